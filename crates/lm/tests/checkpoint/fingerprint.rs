use march_lm::engine::{Device, Tensor};
use march_lm::model::{Model, ModelConfig};

use crate::common::small;

/// The sample reaches from the first to the last number of each tensor, also where it leaves out rows or columns.
#[test]
fn samples_reach_both_ends() {
    let device = Device::reference();
    let model = Model::new(&ModelConfig { intermediate_size: 300, num_hidden_layers: 1, ..small("march") });
    let parameters = model.init(&device, 7).unwrap();
    let own = model.fingerprint(&parameters).unwrap();
    assert_eq!(model.fingerprint(&parameters).unwrap(), own);
    assert!(model.layout().iter().any(|spec| spec.shape[0] > 16 && spec.shape[1..].iter().any(|&n| n > 256)));
    for (i, spec) in model.layout().iter().enumerate() {
        for place in [0, spec.count() - 1] {
            let mut numbers = parameters[i].to_f32();
            numbers[place] += 1.0;
            let mut changed = parameters.clone();
            changed[i] = Tensor::from_slice(&numbers, &spec.shape, &device).unwrap();
            assert_ne!(model.fingerprint(&changed).unwrap(), own, "{} {place}", spec.name);
        }
    }
}
