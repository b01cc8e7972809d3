//! How far the subject's distributions are from another implementation's.

use super::CheckInput;
use crate::goldens::Goldens;
use crate::policy::{PrecisionBounds, policy};
use crate::subject::{PositionLogprob, Precision};

/// A larger lead of their first choice over their second must not be lost, log-probability, except
/// at one position in `TURNED_ONE_OF`.
const DECISIVE_TOP: f32 = 0.5;
const TURNED_ONE_OF: usize = 2_000;
/// Below this mass, what the most likely tokens leave is rounding.
const LEAST_MASS: f64 = 1e-6;

/// Differences over some positions, in nat.
#[derive(Clone, Debug, Default)]
pub(super) struct Distance {
    pub positions: usize,
    /// Sum over the positions of the divergence of ours from theirs.
    kl: f64,
    /// Absolute differences of the log-probabilities of our most likely tokens.
    deltas: Vec<f64>,
    /// Positions with another first choice although theirs is decisive.
    pub turned: usize,
}

impl Distance {
    /// Adds a position: their two most likely tokens, ours, and their log-probability of each of
    /// ours.
    pub(super) fn add(
        &mut self,
        best: [(u32, f32); 2],
        ours: &PositionLogprob,
        theirs: impl Fn((u32, f32)) -> f32,
    ) {
        let (mut kl, mut theirs_left, mut ours_left) = (0.0, 1.0, 1.0);
        for &(id, p) in &ours.top {
            let (theirs, ours) = (f64::from(theirs((id, p))), f64::from(p));
            self.deltas.push((theirs - ours).abs());
            kl += theirs.exp() * (theirs - ours);
            theirs_left -= theirs.exp();
            ours_left -= ours.exp();
        }
        // The rest of the vocabulary counts as one token.
        let (theirs_left, ours_left) = (theirs_left.max(LEAST_MASS), ours_left.max(LEAST_MASS));
        self.kl += kl + theirs_left * (theirs_left / ours_left).ln();
        let [(first, lead), (_, second)] = best;
        let same = ours.top.first().is_some_and(|(id, _)| *id == first);
        self.turned += usize::from(!same && lead - second > DECISIVE_TOP);
        self.positions += 1;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.positions += other.positions;
        self.kl += other.kl;
        self.deltas.extend(&other.deltas);
        self.turned += other.turned;
    }

    pub(super) fn mean_kl(&self) -> f64 {
        self.kl / self.positions as f64
    }

    /// The quantiles 0.5, 0.999 and 1 of the differences.
    fn quantiles(&self) -> [f64; 3] {
        let mut sorted = self.deltas.clone();
        sorted.sort_by(f64::total_cmp);
        [0.5, 0.999, 1.0].map(|part| {
            let at = (sorted.len() as f64 * part) as usize;
            sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
        })
    }

    /// A value that is not a number is beyond every bound.
    pub(super) fn is_within(&self, bounds: &PrecisionBounds) -> bool {
        let [_, p999, most] = self.quantiles();
        self.turned <= self.positions / TURNED_ONE_OF
            && self.mean_kl() <= bounds.mean_kl.value
            && p999 <= bounds.p999.value
            && most <= bounds.most.value
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [p50, p999, most] = self.quantiles();
        write!(
            f,
            "{} positions, mean KL {:.1e}, Δ p50 {p50:.1e}, p99.9 {p999:.1e}, most {most:.1e}",
            self.positions,
            self.mean_kl(),
        )?;
        if self.turned > 0 { write!(f, ", {} first choices differ", self.turned) } else { Ok(()) }
    }
}

impl PrecisionBounds {
    pub(super) fn gate(&self) -> String {
        format!(
            "mean KL ≤ {:.0e}, |Δ log-probability| of the top 20: p99.9 ≤ {}, most ≤ {}; the same \
             first choice where it leads by {DECISIVE_TOP}, but for one of {TURNED_ONE_OF}",
            self.mean_kl.value, self.p999.value, self.most.value
        )
    }
}

impl CheckInput<'_> {
    /// Whether the goldens are a sister release's.
    pub(crate) fn is_like(&self) -> bool {
        let sister = |goldens: &Goldens| !goldens.are_about(self.files);
        !self.files.is_empty() && self.goldens.is_some_and(sister)
    }

    /// The lead of the reference's choice up to which the subject may choose otherwise, nat.
    pub(crate) fn decisive_margin(&self) -> f32 {
        let margins = &policy().margin;
        match (self.is_like(), self.subject.api_manner().foreign) {
            (true, _) => margins.like.value as f32,
            (false, true) => margins.foreign.value as f32,
            (false, false) => self.subject.precision().decisive_margin(),
        }
    }

    /// The bounds for an engine as exact as the subject against another one in f32.
    pub(super) fn precision_bounds(&self) -> &'static PrecisionBounds {
        let tiers = &policy().witness;
        match self.subject.precision() {
            Precision::Exact => &tiers.exact,
            Precision::Stored => &tiers.stored,
            Precision::Bytes => &tiers.bytes,
            Precision::Bf16 => &tiers.bf16,
        }
    }
}
