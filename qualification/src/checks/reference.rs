//! Comparison with the numbers of the reference, or of a sister release's: its hyper-parameters and
//! its distributions over the documents.

use super::distance::Distance;
use super::{CheckFinding, CheckInput};
use crate::goldens::{Document, DocumentRow};
use crate::policy::policy;
use crate::record::Series;
use crate::subject::{PositionLogprob, Result, ScorePath};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The first of the tenants that no other check uses, one for each document.
const DOCUMENTS: u32 = 40;
/// A part of the documents may be this many times as far away as all of them.
const PART: f64 = 3.0;
/// The documents are judged in stretches of this many positions too, because a wrong window or
/// rotation shows late.
const STRETCH: usize = 1024;

pub(super) fn hyper_parameters(input: &mut CheckInput) -> Result<CheckFinding> {
    const GATE: &str = "equal to those of the release that the reference is about";
    let Some(goldens) = input.goldens else {
        return Ok(CheckFinding::not_run("no reference", GATE));
    };
    let found = input.subject.hyper_parameters()?;
    if !found.keys().any(|key| goldens.parameters.contains_key(key)) {
        return Ok(CheckFinding::not_run("the reference's file has another format", GATE));
    }
    let keys = found.keys().chain(goldens.parameters.keys()).filter(|key| shapes_the_model(key));
    let keys: BTreeSet<&String> = keys.collect();
    let mut wrong = Vec::new();
    for &key in &keys {
        let (ours, theirs) = (found.get(key), goldens.parameters.get(key));
        if ours != theirs {
            wrong.push(format!("{key} is {}, not {}", shown(ours), shown(theirs)));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, keys.len(), GATE))
}

/// Whether the key is about the model, and not about a file or about ids of tokens, which other
/// checks compare.
fn shapes_the_model(key: &str) -> bool {
    const OTHERS: [&str; 5] =
        ["_token_id", "transformers_version", "_name_or_path", "dtype", "use_cache"];
    !OTHERS.iter().any(|ending| key.ends_with(ending))
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "absent".to_owned(), Value::to_string)
}

pub(super) fn distributions(input: &mut CheckInput) -> Result<CheckFinding> {
    let parts = parts(input)?;
    let mut all = Distance::default();
    for part in &parts {
        all.merge(&part.distance);
    }
    let (bounds, like) = (input.precision_bounds(), &policy().like.mean_kl);
    let mean = if input.is_like() { like.value } else { bounds.mean_kl.value };
    let gate = if input.is_like() { format!("mean KL ≤ {mean}") } else { bounds.gate() };
    let gate = format!("{gate}; mean KL of each part ≤ {PART} times that");
    if all.positions == 0 {
        return Ok(CheckFinding::not_run("the reference holds no distributions", gate));
    }
    // A value that is not a number is within no bound.
    let near = |part: &&Part| part.distance.mean_kl() <= PART * mean;
    let far: Vec<String> = parts.iter().filter(|part| !near(part)).map(Part::to_string).collect();
    let near = if input.is_like() { all.mean_kl() <= mean } else { all.is_within(bounds) };
    let value = [vec![all.to_string()], far.clone()].concat().join("; ");
    let finding = CheckFinding::new(near && far.is_empty(), value, gate);
    Ok(CheckFinding { series: vec![curve(&parts)], ..finding })
}

/// A stretch of the documents of one domain.
struct Part {
    domain: String,
    /// The first position of the stretch.
    begin: usize,
    distance: Distance,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { domain, begin, distance } = self;
        write!(f, "{domain} from position {begin}: mean KL {:.1e}", distance.mean_kl())
    }
}

fn parts(input: &mut CheckInput) -> Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    for (tenant, document) in (DOCUMENTS..).zip(input.goldens.map_or(&[][..], |g| &g.documents)) {
        for (row, ours) in scored(input, tenant, document)? {
            let begin = row.position / STRETCH * STRETCH;
            let same = |part: &Part| part.domain == document.domain && part.begin == begin;
            let at = parts.iter().position(same).unwrap_or_else(|| {
                let domain = document.domain.clone();
                parts.push(Part { domain, begin, distance: Distance::default() });
                parts.len() - 1
            });
            add(&mut parts[at].distance, row, &ours);
        }
    }
    Ok(parts)
}

fn curve(parts: &[Part]) -> Series {
    let mut by_position: BTreeMap<usize, Distance> = BTreeMap::new();
    for part in parts {
        by_position.entry(part.begin).or_default().merge(&part.distance);
    }
    let points = by_position.iter().map(|(at, found)| (*at as f64, found.mean_kl()));
    Series {
        name: "distance from the reference by position".into(),
        axes: ["position, tokens".into(), "mean KL, nat".into()],
        points: points.collect(),
    }
}

/// The rows of the document that the suite's extent reaches, each with the subject's distribution.
fn scored<'a>(
    input: &mut CheckInput,
    tenant: u32,
    document: &'a Document,
) -> Result<Vec<(&'a DocumentRow, PositionLogprob)>> {
    let room = input.subject.context_tokens().saturating_sub(1);
    let reach = input.scope.document_tokens.min(room) as usize;
    let rows = document.rows.iter().take_while(|row| row.position < reach);
    let Some(last) = rows.clone().last() else { return Ok(Vec::new()) };
    // A score belongs to a token that follows, so one more is given.
    let end = (last.position + 2).min(document.ids.len());
    let mut scores = input.subject.score(tenant, &document.ids[..end], ScorePath::Prefill)?;
    let mut ours = |row: &DocumentRow| scores.get_mut(row.position).and_then(Option::take);
    Ok(rows.filter_map(|row| Some((row, ours(row)?))).collect())
}

fn add(found: &mut Distance, row: &DocumentRow, ours: &PositionLogprob) {
    let [first, second, ..] = row.top[..] else { return };
    // What the reference does not hold is at most as likely as the last that it holds.
    let least = row.top.last().map_or(0.0, |(_, p)| *p);
    found.add([first, second], ours, |(id, p)| {
        row.top.iter().find(|(other, _)| *other == id).map_or(p.min(least), |(_, p)| *p)
    });
}
