//! The targets of the GPU path with the shape of Llama 3.1 8B in bf16 on one H200, what a model of
//! its speed predicts there, and the tables that tell whether they are reached.

use cresset_kernels::gpu::{self, GpuSensor};
use std::fmt::Display;
use std::sync::LazyLock;

#[derive(Clone, Copy)]
pub struct Target {
    bound: Bound,
    unit: &'static str,
    /// The values that were predicted, in the same unit; empty if none were.
    predicted: &'static str,
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

const fn at_least(bound: f64, unit: &'static str) -> Target {
    Target { bound: Bound::AtLeast(bound), unit, predicted: "" }
}

const fn at_most(bound: f64, unit: &'static str) -> Target {
    Target { bound: Bound::AtMost(bound), unit, predicted: "" }
}

/// Seconds from the program's start, with the weights in the page cache.
pub const START: Target = at_most(5.0, "s");
/// Decoding of one row.
pub const DECODE: Target = at_least(256.0, "tok/s").predicted("231 to 241");
pub const DECODE_SHARE: Target = at_least(85.0, "% of reading");
/// A prompt of 8192 tokens.
pub const PREFILL_SHARE: Target = at_least(65.0, "% of product").predicted("66 to 69");
/// Requests of 1000 prompt tokens and 1000 answer tokens.
pub const OFFLINE: Target = at_least(9000.0, "tok/s").predicted("7800 to 9200");
/// Time between tokens with four streams.
pub const FIRST_TOKEN: Target = at_most(20.0, "ms");
pub const BETWEEN_TOKENS: Target = at_most(4.3, "ms").predicted("4.4 to 4.6");
pub const BETWEEN_TOKENS_P99: Target = at_most(2.0, "× median");
/// Time to the first token after a prefix of 1000 tokens in the cache.
pub const WARM_FIRST_TOKEN: Target = at_most(10.0, "ms");
/// The host's part of a step with 256 rows.
pub const HOST: Target = at_most(0.05, "ms");
/// Answers that keep to formats, many and one, as a share of the rate without.
pub const FORMATS: Target = at_least(0.97, "of the rate without");
pub const FORMAT_OF_ONE: Target = at_least(0.95, "of the rate without");
pub const DETERMINISTIC_COST: Target = at_most(10.0, "%");

impl Target {
    const fn predicted(self, predicted: &'static str) -> Self {
        Self { predicted, ..self }
    }

    /// What was predicted, with its unit.
    fn prediction(self) -> Option<String> {
        (!self.predicted.is_empty()).then(|| format!("{} {}", self.predicted, self.unit))
    }

    /// Whether the value reaches the target; NaN does not.
    fn verdict(self, found: f64) -> String {
        let Self { bound, unit, .. } = self;
        let (sign, bound, hit) = match bound {
            Bound::AtLeast(least) => ("≥", least, found >= least),
            Bound::AtMost(most) => ("≤", most, found <= most),
        };
        format!("{}: {sign} {bound} {unit}", if hit { "hit" } else { "MISSED" })
    }
}

/// The clocks of the first GPU now: a figure holds for them.
fn clocks() -> String {
    static SENSOR: LazyLock<Option<GpuSensor>> = LazyLock::new(|| gpu::sensor(0).ok());
    SENSOR.as_ref().map(|sensor| sensor.read().clocks()).unwrap_or_default()
}

pub fn head() {
    println!("| work | measured | of the ceiling | target | predicted | clocks |");
    println!("|---|---|---|---|---|---|");
}

/// Prints a line of the table, with each target and whether it was reached.
pub fn row(
    work: impl Display,
    measured: impl Display,
    ceiling: impl Display,
    targets: &[(Target, f64)],
) {
    let verdicts: Vec<String> =
        targets.iter().map(|(target, found)| target.verdict(*found)).collect();
    let predictions: Vec<String> =
        targets.iter().filter_map(|(target, _)| target.prediction()).collect();
    let (verdicts, predictions) = (verdicts.join("; "), predictions.join("; "));
    let clocks = clocks();
    println!("| {work} | {measured} | {ceiling} | {verdicts} | {predictions} | {clocks} |");
}

/// Prints a line for which nothing is wanted and something was predicted.
pub fn predicted_row(
    work: impl Display,
    measured: impl Display,
    ceiling: impl Display,
    predicted: &str,
) {
    println!("| {work} | {measured} | {ceiling} | | {predicted} | {} |", clocks());
}
