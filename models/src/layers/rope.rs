//! RoPE tables for every scaling.

use crate::Result;
use crate::config::{RopeConfig, RopeScaling};
use candle_core::{Device, Tensor};
use cresset_kernels::rope::{RopeStyle, RopeTable};
use std::f32::consts::PI;

/// Angles are rounded to f32 as position × frequency, as the reference implementations do: at position 8000 a more exact
/// product would differ from what the model was trained with by more than any kernel's error.
pub fn table(config: &RopeConfig, style: RopeStyle, positions: usize) -> Result<RopeTable> {
    let frequencies = frequencies(config);
    let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
    let (sin, cos): (Vec<f32>, Vec<f32>) = angles.map(f32::sin_cos).unzip();
    let shape = (positions, frequencies.len());
    Ok(RopeTable {
        cos: Tensor::from_vec(cos, shape, &Device::Cpu)?,
        sin: Tensor::from_vec(sin, shape, &Device::Cpu)?,
        style,
    })
}

/// Radians per position, `[rotary_dim / 2]`.
fn frequencies(config: &RopeConfig) -> Vec<f32> {
    let dim = config.rotary_dim;
    let base = |i: usize| 1.0 / config.theta.powf((2 * i) as f32 / dim as f32);
    (0..dim / 2).map(|i| scaled(base(i), i, &config.scaling)).collect()
}

fn scaled(frequency: f32, index: usize, scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Factors(factors) => frequency / factors[index],
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let original = original_max_positions as f32;
            let wavelength = 2.0 * PI / frequency;
            if wavelength < original / high_freq_factor {
                frequency
            } else if wavelength > original / low_freq_factor {
                frequency / factor
            } else {
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scaling: RopeScaling, want: [f32; 4]) {
        let config = RopeConfig { theta: 10_000.0, rotary_dim: 8, scaling };
        for (got, want) in frequencies(&config).into_iter().zip(want) {
            assert!((got - want).abs() <= 1e-6 * want, "{:?}: {got} instead of {want}", config.scaling);
        }
    }

    #[test]
    fn frequencies_of_each_scaling() {
        check(RopeScaling::None, [1.0, 0.1, 0.01, 0.001]);
        check(RopeScaling::Linear { factor: 4.0 }, [0.25, 0.025, 0.0025, 0.000_25]);
        check(RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0]), [1.0, 0.05, 0.0025, 0.000_125]);
        // Wavelengths 6.3, 63, 628 and 6283: kept, kept, blended (1024 / 628.3 = 1.63, smooth 0.21), divided.
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 1024,
        };
        check(llama3, [1.0, 0.1, 0.003_086_761, 0.000_125]);
    }

    #[test]
    fn the_first_position_is_not_rotated() {
        let config = RopeConfig { theta: 10_000.0, rotary_dim: 4, scaling: RopeScaling::None };
        let table = table(&config, RopeStyle::Neox, 2).unwrap();
        assert_eq!(table.cos.to_vec2::<f32>().unwrap()[0], [1.0, 1.0]);
        assert_eq!(table.sin.to_vec2::<f32>().unwrap(), [[0.0, 0.0], [1f32.sin(), 0.01f32.sin()]]);
    }
}
