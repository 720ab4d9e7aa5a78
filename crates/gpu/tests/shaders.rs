//! Every shader parses, validates and translates to SPIR-V, MSL and HLSL, without a device.

use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::common::tests;

tests![every_shader_translates];

fn every_shader_translates() {
    let shaders = march_gpu::shaders();
    assert!(!shaders.is_empty());
    for (name, entry, text) in shaders {
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&text)));
        assert!(module.entry_points.iter().any(|point| point.name == entry), "{name}: no entry {entry}");
        let info = Validator::new(ValidationFlags::all(), Capabilities::IMMEDIATES)
            .validate(&module)
            .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&text)));
        let options = spv::Options::default();
        let words = spv::write_vec(&module, &info, &options, None);
        assert!(!words.unwrap_or_else(|error| panic!("{name}: SPIR-V: {error}")).is_empty());
        let options = msl::Options { fake_missing_bindings: true, ..Default::default() };
        msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
            .unwrap_or_else(|error| panic!("{name}: MSL: {error}"));
        let options = hlsl::Options {
            fake_missing_bindings: true,
            immediates_target: Some(hlsl::BindTarget::default()),
            special_constants_binding: Some(hlsl::BindTarget { register: 1, ..Default::default() }),
            ..Default::default()
        };
        let mut out = String::new();
        hlsl::Writer::new(&mut out, &options, &hlsl::PipelineOptions::default())
            .write(&module, &info, None)
            .unwrap_or_else(|error| panic!("{name}: HLSL: {error}"));
    }
}
