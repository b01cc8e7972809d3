//! The comparison with a second implementation of the same model, which shares nothing with the
//! serving path but the file.

use super::distance::Distance;
use super::texts::PLAIN_TEXTS;
use super::{CheckFinding, CheckInput};
use crate::subject::{PositionLogprob, Result, ScorePath, WitnessRow, Witnessed};

/// A tenant that no other check uses.
const WITNESSED: u32 = 15;

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
    let bounds = input.precision_bounds();
    let mut passed = true;
    let mut values = vec![format!("against {by}")];
    for (path, scores) in [("prefill", &prefill), ("decode", &decode)] {
        let found = distance(&rows, scores, &wanted);
        passed &= found.is_within(bounds);
        values.push(format!("{path} {found}"));
    }
    Ok(CheckFinding::new(passed, values.join("; "), bounds.gate()))
}

/// The beginning of all texts, one after the other, as far as the context holds it as a prompt.
fn text(input: &mut CheckInput) -> Result<Vec<u32>> {
    let whole = PLAIN_TEXTS.iter().map(|plain| plain.text).collect::<Vec<_>>().join("\n\n");
    let mut ids = input.subject.encode(&whole, false)?;
    let longest_prompt = input.subject.context_tokens().saturating_sub(1);
    ids.truncate(longest_prompt.min(input.scope.witness_tokens + 1) as usize);
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

fn distance(
    rows: &[WitnessRow],
    scores: &[Option<PositionLogprob>],
    wanted: &[Vec<u32>],
) -> Distance {
    let mut found = Distance::default();
    for row in rows {
        if let Some(Some(ours)) = scores.get(row.position) {
            let at = |id: u32| wanted[row.position].binary_search(&id).ok();
            let theirs = |(id, _)| at(id).and_then(|at| row.wanted.get(at)).copied();
            found.add(row.top, ours, |one| theirs(one).unwrap_or(f32::NAN));
        }
    }
    found
}
