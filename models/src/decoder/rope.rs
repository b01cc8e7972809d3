//! RoPE tables for every scaling.

use crate::Result;
use crate::config::{QueryGrowth, RopeConfig, RopeScaling, Yarn};
use cresset_kernels::Ops;
use cresset_kernels::rope::{RopeStyle, RopeTable};
use std::f32::consts::PI;

/// The table of a rotation where the ops read it.
pub struct RopeBuffers<O: Ops> {
    cos: O::Buffer,
    sin: O::Buffer,
    /// `[positions]`: the factors of queries, if they grow with their positions.
    query_scales: Option<O::Buffer>,
    rotary_dim: usize,
    style: RopeStyle,
}

impl<O: Ops> RopeBuffers<O> {
    pub fn table(&self) -> RopeTable<O::View<'_>> {
        let Self { cos, sin, query_scales, rotary_dim, style } = self;
        RopeTable {
            cos: O::view(cos),
            sin: O::view(sin),
            rotary_dim: *rotary_dim,
            style: *style,
            query_scales: query_scales.as_ref().map(O::view),
        }
    }
}

/// Computes the table of the first `positions` positions and puts it where the ops read it.
pub fn upload<O: Ops>(
    ops: &O,
    config: &RopeConfig,
    style: RopeStyle,
    growth: Option<QueryGrowth>,
    positions: usize,
) -> Result<RopeBuffers<O>> {
    let [cos, sin] = table(config, positions);
    let (cos, sin) = (ops.upload(&cos)?, ops.upload(&sin)?);
    let scale = |growth: QueryGrowth| {
        let factor = |position| 1.0 + growth.beta * (1.0 + (position / growth.length) as f32).ln();
        ops.upload(&(0..positions).map(factor).collect::<Vec<_>>())
    };
    let query_scales = growth.map(scale).transpose()?;
    Ok(RopeBuffers { cos, sin, query_scales, rotary_dim: config.rotary_dim, style })
}

/// Computes the cosines and the sines of all positions, each `[positions, rotary_dim / 2]`.
///
/// Angles are rounded to f32 as position × frequency, as the reference implementations do: at
/// position 8000 a more exact product would differ from what the model was trained with by more
/// than any kernel's error.
fn table(config: &RopeConfig, positions: usize) -> [Vec<f32>; 2] {
    let (shared, length) = (frequencies(config, positions), attention_factor(&config.scaling));
    let (mut sin, mut cos) = (Vec::new(), Vec::new());
    for position in 0..positions {
        // "NTK" changes the frequencies as a sequence grows; keys already in the cache stay as they
        // were.
        let grows = matches!(config.scaling, RopeScaling::Dynamic { .. });
        let own = grows.then(|| frequencies(config, position + 1));
        let angles =
            own.as_ref().unwrap_or(&shared).iter().map(|frequency| position as f32 * frequency);
        let (s, c): (Vec<f32>, Vec<f32>) =
            angles.map(|a| (a.sin() * length, a.cos() * length)).unzip();
        sin.extend(s);
        cos.extend(c);
    }
    [cos, sin]
}

fn attention_factor(scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::Yarn(Yarn { attention_factor, .. })
        | RopeScaling::LongRope { attention_factor, .. } => *attention_factor,
        _ => 1.0,
    }
}

/// Radians per position, `[rotary_dim / 2]`, for sequences of `length`. LongRoPE takes the longest
/// length that is served, so that a token's K does not depend on how far its sequence will grow,
/// and can be cached and shared.
fn frequencies(config: &RopeConfig, length: usize) -> Vec<f32> {
    let dim = config.rotary_dim;
    let theta = match config.scaling {
        RopeScaling::Dynamic { factor, original_max_positions } => {
            let longer = (length as f64 / original_max_positions as f64).max(1.0);
            let stretch = f64::from(factor) * longer - (f64::from(factor) - 1.0);
            (f64::from(config.theta) * stretch.powf(dim as f64 / (dim as f64 - 2.0))) as f32
        }
        _ => config.theta,
    };
    let base = |i: usize| 1.0 / theta.powf((2 * i) as f32 / dim as f32);
    (0..dim / 2).map(|i| scaled(base(i), i, config, length)).collect()
}

fn scaled(frequency: f32, index: usize, config: &RopeConfig, length: usize) -> f32 {
    match &config.scaling {
        RopeScaling::None | RopeScaling::Dynamic { .. } => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Factors(factors) => frequency / factors[index],
        RopeScaling::LongRope { short, long, original_max_positions, .. } => {
            frequency / if length > *original_max_positions { long[index] } else { short[index] }
        }
        RopeScaling::Yarn(yarn) => {
            let kept = 1.0 - yarn_ramp(yarn, config, index);
            frequency / yarn.factor * (1.0 - kept) + frequency * kept
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            let original = original_max_positions as f32;
            let wavelength = 2.0 * PI / frequency;
            if wavelength < original / high_freq_factor {
                frequency
            } else if wavelength > original / low_freq_factor {
                frequency / factor
            } else {
                let smooth = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

/// The place of a frequency between being kept (0) and divided (1).
fn yarn_ramp(yarn: &Yarn, config: &RopeConfig, index: usize) -> f32 {
    // The dimension that makes this many rotations over the original length.
    let dimension = |rotations: f32| {
        let turns = yarn.original_max_positions as f64
            / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
        config.rotary_dim as f64 * turns.ln() / (2.0 * f64::from(config.theta).ln())
    };
    let (mut low, mut high) = (dimension(yarn.beta_fast), dimension(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(config.rotary_dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    ((index as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the frequencies for sequences of 64 tokens.
    fn check(scaling: RopeScaling, want: [f32; 4]) {
        let config = RopeConfig { theta: 10_000.0, rotary_dim: 8, scaling };
        for (got, want) in frequencies(&config, 64).into_iter().zip(want) {
            assert!(
                (got - want).abs() <= 1e-6 * want,
                "{:?}: {got} instead of {want}",
                config.scaling
            );
        }
    }

    #[test]
    fn frequencies_of_each_scaling() {
        check(RopeScaling::None, [1.0, 0.1, 0.01, 0.001]);
        check(RopeScaling::Linear { factor: 4.0 }, [0.25, 0.025, 0.0025, 0.000_25]);
        check(RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0]), [1.0, 0.05, 0.0025, 0.000_125]);
        // The wavelengths are 6.3, 63, 628 and 6283: kept, kept, blended (1024 / 628.3 = 1.63,
        // smooth 0.21), divided.
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 1024,
        };
        check(llama3, [1.0, 0.1, 0.003_086_761, 0.000_125]);
        // At twice the original length and a factor of 4, the base grows by (4 · 2 − 3)^(8/6) =
        // 8.55.
        check(
            RopeScaling::Dynamic { factor: 4.0, original_max_positions: 64 },
            [1.0, 0.1, 0.01, 0.001],
        );
        check(
            RopeScaling::Dynamic { factor: 4.0, original_max_positions: 32 },
            [1.0, 0.058_480_35, 0.003_419_952, 0.000_2],
        );
        let long_rope = |original_max_positions| RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![1.0, 2.0, 4.0, 8.0],
            attention_factor: 1.0,
            original_max_positions,
        };
        check(long_rope(64), [1.0, 0.1, 0.01, 0.001]);
        check(long_rope(63), [1.0, 0.05, 0.0025, 0.000_125]);
        // The rotations over 1024 positions are 163, 16, 1.6, 0.16; the ramp goes from dimension
        // 0.7 to 2.2, widened to 0 and 3.
        let yarn = Yarn {
            factor: 4.0,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_positions: 1024,
            truncate: true,
            mscale_all_dim: 0.0,
        };
        check(RopeScaling::Yarn(yarn), [1.0, 0.075, 0.005, 0.000_25]);
    }

    #[test]
    fn the_first_position_is_not_rotated() {
        let config = RopeConfig { theta: 10_000.0, rotary_dim: 4, scaling: RopeScaling::None };
        let [cos, sin] = table(&config, 2);
        assert_eq!(cos[..2], [1.0, 1.0]);
        assert_eq!(sin, [0.0, 0.0, 1f32.sin(), 0.01f32.sin()]);
    }
}
