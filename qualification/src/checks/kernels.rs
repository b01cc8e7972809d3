//! The kernels of this machine, whatever the model.

use super::{CheckFinding, CheckInput};
use crate::policy::{KernelBounds, Threshold, policy};
use crate::subject::{Precision, Result};

pub(super) fn kernels(input: &mut CheckInput) -> Result<CheckFinding> {
    let bounds = &policy().kernels;
    let of_rounded = match input.subject.precision() {
        Precision::Bytes => &bounds.bytes,
        _ => &bounds.rounded,
    };
    let gate = gate(bounds, of_rounded);
    let Some(found) = input.subject.kernels()? else {
        let why = "the stored references are computed on the CPU only";
        return Ok(CheckFinding::not_run(why, &gate));
    };
    let mut wrong = Vec::new();
    let mut largest = [0f64; 3];
    for kernel in &found {
        let place = if kernel.rounded { 2 } else { 1 };
        let bound = if kernel.rounded { of_rounded } else { &bounds.relative };
        largest[0] = largest[0].max(kernel.most);
        largest[place] = largest[place].max(kernel.relative);
        // What is not a number is within no bound.
        let within = kernel.most <= bounds.most.value && kernel.relative <= bound.value;
        if !within {
            wrong.push(format!("{}: {:.1e}, {:.1e}", kernel.name, kernel.most, kernel.relative));
        }
    }
    let mut finding = CheckFinding::from_wrong(&wrong, found.len(), &gate);
    let [most, relative, rounded] = largest;
    finding.value = format!("{}; largest {most:.1e}, {relative:.1e}, {rounded:.1e}", finding.value);
    Ok(finding)
}

fn gate(bounds: &KernelBounds, rounded: &Threshold) -> String {
    format!(
        "|Δ log-probability| of the top 20 ≤ {:.0e}, relative squares ≤ {:.0e} in f32 and {:.0e} \
         with rounded activations",
        bounds.most.value, bounds.relative.value, rounded.value
    )
}
