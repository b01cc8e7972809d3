//! The comparison with a second implementation of the same model, which shares nothing with the
//! serving path but the file.

use super::texts::PLAIN_TEXTS;
use super::{CheckFinding, CheckInput};
use crate::policy::{WitnessBounds, policy};
use crate::subject::{PositionLogprob, Precision, Result, ScorePath, WitnessRow, Witnessed};

/// A tenant that no other check uses.
const WITNESSED: u32 = 15;
/// A larger lead of the witness's first choice over its second must not be lost: log-probability.
const DECISIVE_TOP: f32 = 0.5;
/// Below this mass, what the most likely tokens leave is rounding.
const LEAST_MASS: f64 = 1e-6;

pub(super) fn witness(input: &mut CheckInput) -> Result<CheckFinding> {
    let ids = text(input)?;
    let prefill = input.subject.score(WITNESSED, &ids, ScorePath::Prefill)?;
    // The prompts of this one are found in the cache that the first left, so it decodes.
    let decode = input.subject.score(WITNESSED, &ids, ScorePath::Decode)?;
    let wanted: Vec<Vec<u32>> =
        prefill.iter().zip(&decode).map(|(a, b)| wanted(a.as_ref(), b.as_ref())).collect();
    let (by, rows) = match input.subject.witness(&ids, &wanted)? {
        Witnessed::Absent(why) => return Ok(CheckFinding::not_run(why, "the same distribution")),
        Witnessed::Scores { by, rows } => (by, rows),
    };
    let tiers = &policy().witness;
    let bounds = match input.subject.precision() {
        Precision::Exact => &tiers.exact,
        Precision::Stored => &tiers.stored,
        Precision::Bf16 => &tiers.bf16,
    };
    let mut passed = true;
    let mut values = vec![format!("against {by}")];
    for (path, scores) in [("prefill", &prefill), ("decode", &decode)] {
        let found = Distance::between(&rows, scores, &wanted);
        passed &= found.is_within(bounds);
        values.push(format!("{path} {found}"));
    }
    Ok(CheckFinding::new(passed, values.join("; "), gate(bounds)))
}

fn gate(bounds: &WitnessBounds) -> String {
    format!(
        "mean KL ≤ {:.0e}, |Δ log-probability| of the top 20: p99.9 ≤ {}, most ≤ {}; the same \
         first choice where it leads by {DECISIVE_TOP}",
        bounds.mean_kl.value, bounds.p999.value, bounds.most.value
    )
}

/// The beginning of all texts, one after the other.
fn text(input: &mut CheckInput) -> Result<Vec<u32>> {
    let whole = PLAIN_TEXTS.iter().map(|plain| plain.text).collect::<Vec<_>>().join("\n\n");
    let mut ids = input.subject.encode(&whole, false)?;
    let room = input.subject.context_tokens().saturating_sub(1);
    ids.truncate(input.scope.witness_tokens.min(room) as usize + 1);
    Ok(ids)
}

/// The ids whose log-probabilities are compared at a position.
fn wanted(a: Option<&PositionLogprob>, b: Option<&PositionLogprob>) -> Vec<u32> {
    let mut ids: Vec<u32> =
        [a, b].into_iter().flatten().flat_map(|l| &l.top).map(|(id, _)| *id).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// How far the subject's distributions are from the witness's.
#[derive(Debug, Default)]
struct Distance {
    positions: usize,
    kl: f64,
    /// Absolute differences of log-probabilities, ascending.
    deltas: Vec<f64>,
    /// Positions with another first choice although the witness's is decisive.
    turned: usize,
}

impl Distance {
    fn between(
        rows: &[WitnessRow],
        scores: &[Option<PositionLogprob>],
        wanted: &[Vec<u32>],
    ) -> Self {
        let mut found = Self::default();
        for row in rows {
            if let Some(Some(ours)) = scores.get(row.position) {
                found.add(row, ours, &wanted[row.position]);
            }
        }
        found.kl /= found.positions.max(1) as f64;
        found.deltas.sort_by(f64::total_cmp);
        found
    }

    fn add(&mut self, row: &WitnessRow, ours: &PositionLogprob, wanted: &[u32]) {
        let (mut kl, mut theirs_left, mut ours_left) = (0.0, 1.0, 1.0);
        for (id, p) in &ours.top {
            let at = wanted.binary_search(id).ok().and_then(|at| row.wanted.get(at));
            let (theirs, ours) = (f64::from(at.copied().unwrap_or(f32::NAN)), f64::from(*p));
            self.deltas.push((theirs - ours).abs());
            kl += theirs.exp() * (theirs - ours);
            theirs_left -= theirs.exp();
            ours_left -= ours.exp();
        }
        // The rest of the vocabulary counts as one token.
        let (theirs_left, ours_left) = (theirs_left.max(LEAST_MASS), ours_left.max(LEAST_MASS));
        self.kl += kl + theirs_left * (theirs_left / ours_left).ln();
        let [(first, lead), (_, second)] = row.top;
        let same = ours.top.first().is_some_and(|(id, _)| *id == first);
        self.turned += usize::from(!same && lead - second > DECISIVE_TOP);
        self.positions += 1;
    }

    fn quantile(&self, part: f64) -> f64 {
        let at = (self.deltas.len() as f64 * part) as usize;
        let last = self.deltas.len().saturating_sub(1);
        self.deltas.get(at.min(last)).copied().unwrap_or(f64::NAN)
    }

    /// A value that is not a number is beyond every bound.
    fn is_within(&self, bounds: &WitnessBounds) -> bool {
        self.positions > 0
            && self.turned == 0
            && self.kl <= bounds.mean_kl.value
            && self.quantile(0.999) <= bounds.p999.value
            && self.quantile(1.0) <= bounds.most.value
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} positions, mean KL {:.1e}, Δ p50 {:.1e}, p99.9 {:.1e}, most {:.1e}",
            self.positions,
            self.kl,
            self.quantile(0.5),
            self.quantile(0.999),
            self.quantile(1.0)
        )?;
        if self.turned > 0 { write!(f, ", {} first choices differ", self.turned) } else { Ok(()) }
    }
}
