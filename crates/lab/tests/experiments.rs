//! The files of `configs/reproduce/`.

use std::path::Path;

use march_lab::reproduce::Experiment;

#[test]
fn every_file_is_an_experiment() {
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/reproduce")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(name == "common" || Experiment::open(name).is_ok(), "{name}");
    }
}
