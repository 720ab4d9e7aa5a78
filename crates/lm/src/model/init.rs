//! Initial values of parameters: identical for the same seed, whatever the number of threads.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

use super::parameters::{Init, ParameterSpec};

/// How many numbers are drawn from one stream of the generator.
const BLOCK: usize = 1 << 20;

/// The initial values of the parameter with the given index in its layout.
pub(super) fn values(spec: &ParameterSpec, index: usize, range: f64, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0f32; spec.count()];
    let fill = |(block, values): (usize, &mut [f32])| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(((index as u64) << 32) + block as u64);
        for value in values {
            *value = draw(spec.init, range, &mut random) as f32;
        }
    };
    if values.len() <= BLOCK {
        fill((0, &mut values));
        return values;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let mut shares: Vec<Vec<(usize, &mut [f32])>> = (0..threads).map(|_| Vec::new()).collect();
        for (block, values) in values.chunks_mut(BLOCK).enumerate() {
            shares[block % threads].push((block, values));
        }
        for share in shares {
            scope.spawn(move || share.into_iter().for_each(fill));
        }
    });
    values
}

fn draw(init: Init, range: f64, random: &mut impl Rng) -> f64 {
    match init {
        Init::Normal => {
            let normal: f64 = StandardNormal.sample(random);
            normal * range
        }
        Init::Constant(value) => value,
        Init::DecayRate => (0.01 + uniform(random) * (16.0 - 0.01)).ln(),
        Init::TimeStep => {
            let (low, high) = (1e-3f64.ln(), 1e-1f64.ln());
            let step = (low + uniform(random) * (high - low)).exp().max(1e-4);
            // softplus(b) = step  ⇔  b = step + ln(1 − exp(−step))
            step + (-(-step).exp_m1()).ln()
        }
    }
}

/// A uniform number in [0, 1).
fn uniform(random: &mut impl Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
