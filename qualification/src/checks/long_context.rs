//! Checks what the model still knows of the beginning of a long text, beside a second
//! implementation that reads the same text.

use super::distance::Distance;
use super::{CheckFinding, CheckInput};
use crate::record::Series;
use crate::subject::{PositionLogprob, Result, WitnessRow, Witnessed};
use std::collections::{BTreeSet, VecDeque};

/// A tenant that no other check uses.
const READ: u32 = 18;
/// The eighths of the context at whose end is asked for what was noted before.
const REACHES: [usize; 5] = [1, 2, 4, 6, 8];
/// The places of the notes between the beginning and the question, in eighths of the way.
const DEPTHS: [usize; 3] = [0, 4, 7];
/// Longest text: the second implementation's attention needs memory for it, tokens.
const LONGEST: usize = 32_768;
/// Tokens at the end for the last questions, and the least that is long.
const LAST: usize = 256;
const LEAST: usize = 768;
/// The distributions are compared at one position in this many.
const STEP: usize = 16;
/// A part of the text may be this many times as far away as its first eighth.
const PART: f64 = 3.0;
const PLACES: [&str; 15] = [
    "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Paris", "Delhi", "Quito", "Accra", "Dublin",
    "Havana", "Warsaw", "Lisbon", "Nairobi", "Athens",
];

/// A long text that asks for what stands in it.
struct LongText {
    ids: Vec<u32>,
    /// For each of [`REACHES`], the positions whose next token belongs to an answer.
    answers: [Vec<usize>; REACHES.len()],
}

/// A piece of text that is inserted as soon as the text has `at` tokens.
struct Insertion {
    at: usize,
    text: String,
    /// The number of the reach, and what is asked for.
    answer: Option<(usize, String)>,
}

fn insertions(length: usize) -> Vec<Insertion> {
    let mut all = Vec::new();
    for (reach, eighths) in REACHES.iter().enumerate() {
        let end = length * eighths / 8;
        for (depth, within) in DEPTHS.iter().enumerate() {
            let number = reach * DEPTHS.len() + depth;
            let (place, code) = (PLACES[number], 1_000 + (number * 2_713 + 577) % 9_000);
            let question = format!(" The code of {place} is");
            let note = format!("{question} {code}.");
            all.push(Insertion { at: end * within / 8, text: note, answer: None });
            let answer = Some((reach, format!(" {code}.")));
            all.push(Insertion { at: end, text: question, answer });
        }
    }
    all.sort_by_key(|one| one.at);
    all
}

fn written(input: &mut CheckInput, length: usize) -> Result<LongText> {
    let mut left: VecDeque<Insertion> = insertions(length - LAST).into();
    let between = input.varied_text(length, "bridge")?;
    let mut between = between.chunks(24);
    let mut text = LongText { ids: Vec::new(), answers: Default::default() };
    while let Some(next) = left.front() {
        if next.at > text.ids.len() {
            text.ids.extend(between.next().into_iter().flatten());
            continue;
        }
        let Some(next) = left.pop_front() else { break };
        text.ids.extend(input.subject.encode(&next.text, false)?);
        if let Some((reach, answer)) = next.answer {
            let answer = input.subject.encode(&answer, false)?;
            let begin = text.ids.len() - 1;
            text.answers[reach].extend(begin..begin + answer.len());
            text.ids.extend(answer);
        }
    }
    let rest = length.saturating_sub(text.ids.len());
    text.ids.extend(between.flatten().take(rest));
    Ok(text)
}

pub(super) fn recall(input: &mut CheckInput) -> Result<CheckFinding> {
    let bounds = input.precision_bounds();
    let (most, mean) = (bounds.most.value, bounds.mean_kl.value);
    let gate = format!(
        "answers as likely as the witness finds them, ± {most} nat; mean KL of each eighth ≤ \
         {PART} times that of the first, or ≤ {mean:.0e}"
    );
    let room = input.subject.context_tokens().min(input.scope.context_tokens) as usize;
    if !input.is_full() || room < LEAST {
        let why = if input.is_full() { "the context is short" } else { "the full suite runs it" };
        return Ok(CheckFinding::not_run(why, gate));
    }
    let text = written(input, room.min(LONGEST) - 1)?;
    let scores = input.subject.score_at(READ, &text.ids, &text.compared())?;
    let wanted = wanted(&scores);
    let (by, rows) = match input.subject.witness(&text.ids, &wanted)? {
        Witnessed::Absent(why) => return Ok(CheckFinding::not_run(why, gate)),
        Witnessed::Scores { by, rows } => (by, rows),
    };
    let compared = RecallComparison { text: &text, scores: &scores, wanted: &wanted, rows: &rows };
    let (recalled, eighths) = (compared.recalled(), compared.eighths());
    let near = recalled.iter().all(|[ours, theirs]| (ours - theirs).abs() <= most);
    let first = eighths.first().map_or(f64::NAN, Distance::mean_kl);
    let bound = (PART * first).max(mean);
    let within = eighths.iter().all(|part| part.mean_kl() <= bound);
    let value = format!("against {by}; {}; {}", told(&recalled), told_kl(&eighths));
    let finding = CheckFinding::new(near && within && !first.is_nan(), value, gate);
    Ok(CheckFinding { series: vec![curve(&eighths, text.ids.len())], ..finding })
}

impl LongText {
    /// The positions whose distributions are compared, in order.
    fn compared(&self) -> Vec<usize> {
        let every = (0..self.ids.len() - 1).filter(|at| at % STEP == STEP - 1);
        let all: BTreeSet<usize> = every.chain(self.answers.iter().flatten().copied()).collect();
        all.into_iter().collect()
    }
}

/// The ids whose log-probabilities are compared at each position: none at most of them.
fn wanted(scores: &[Option<PositionLogprob>]) -> Vec<Vec<u32>> {
    let ids = |score: &Option<PositionLogprob>| {
        score.iter().flat_map(|score| &score.top).map(|(id, _)| *id).collect()
    };
    scores.iter().map(ids).collect()
}

struct RecallComparison<'a> {
    text: &'a LongText,
    scores: &'a [Option<PositionLogprob>],
    wanted: &'a [Vec<u32>],
    rows: &'a [WitnessRow],
}

impl RecallComparison<'_> {
    /// Mean log-probability of the answers' tokens at each reach, ours and the witness'. A token
    /// that is not among our most likely ones counts as the last of them.
    fn recalled(&self) -> [[f64; 2]; REACHES.len()] {
        std::array::from_fn(|reach| {
            let mut sums = [0.0; 2];
            let answers = &self.text.answers[reach];
            for pair in answers.iter().filter_map(|&at| self.answer(at)) {
                sums = [0, 1].map(|side| sums[side] + f64::from(pair[side]));
            }
            sums.map(|sum| sum / answers.len() as f64)
        })
    }

    fn answer(&self, at: usize) -> Option<[f32; 2]> {
        let (ours, row) = (self.scores[at].as_ref()?, self.row(at)?);
        let least = ours.top.last()?.1;
        let next = self.wanted[at].iter().position(|id| *id == self.text.ids[at + 1]);
        let Some(next) = next else { return Some([least, least]) };
        Some([ours.top[next].1, row.wanted[next].max(least)])
    }

    fn row(&self, at: usize) -> Option<&WitnessRow> {
        let found = self.rows.binary_search_by_key(&at, |row| row.position).ok()?;
        Some(&self.rows[found])
    }

    fn eighths(&self) -> Vec<Distance> {
        let mut parts = vec![Distance::default(); 8];
        for row in self.rows {
            let (at, wanted) = (row.position, &self.wanted[row.position]);
            let Some(ours) = self.scores[at].as_ref().filter(|_| !wanted.is_empty()) else {
                continue;
            };
            let theirs = |id: u32| wanted.iter().position(|other| *other == id);
            let part = at * 8 / self.scores.len();
            parts[part].add(row.top, ours, |(id, _)| {
                theirs(id).and_then(|at| row.wanted.get(at)).copied().unwrap_or(f32::NAN)
            });
        }
        parts.retain(|part| part.positions > 0);
        parts
    }
}

fn told(recalled: &[[f64; 2]]) -> String {
    let each = REACHES.iter().zip(recalled);
    let each = each.map(|(reach, [a, b])| format!("{reach}/8: {a:.3} ({b:.3})"));
    format!("answers in nat (the witness'): {}", each.collect::<Vec<_>>().join(", "))
}

fn told_kl(eighths: &[Distance]) -> String {
    let most = eighths.iter().map(Distance::mean_kl).fold(0.0, f64::max);
    let first = eighths.first().map_or(f64::NAN, Distance::mean_kl);
    format!("mean KL of the first eighth {first:.1e}, at most {most:.1e}")
}

fn curve(eighths: &[Distance], tokens: usize) -> Series {
    let points = eighths.iter().enumerate();
    Series {
        name: "distance from the witness in a long text".into(),
        axes: ["position, tokens".into(), "mean KL, nat".into()],
        points: points.map(|(n, part)| ((n * tokens / 8) as f64, part.mean_kl())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{Suite, SuiteScope};
    use crate::testing::fake::Fake;
    use std::collections::BTreeMap;

    #[test]
    fn every_question_comes_after_its_note_and_within_the_context() {
        let mut fake = Fake::default();
        let scope = SuiteScope::new(Suite::Full, 0, &fake);
        let files = BTreeMap::new();
        let mut input = CheckInput { subject: &mut fake, files: &files, goldens: None, scope };
        let text = written(&mut input, 1023).unwrap();
        assert_eq!(text.ids.len(), 1023);
        let whole: Vec<u8> = text.ids.iter().map(|id| *id as u8).collect();
        let whole = String::from_utf8(whole).unwrap();
        for place in PLACES {
            let said = whole.matches(&format!(" The code of {place} is ")).count();
            assert_eq!(said, 2, "{place}");
        }
        for (reach, answers) in text.answers.iter().enumerate() {
            assert_eq!(answers.len(), DEPTHS.len() * " 1234.".len());
            let last = answers.last().unwrap() + 1;
            assert!(last >= (1023 - LAST) * REACHES[reach] / 8, "{reach}");
            assert_eq!(whole.as_bytes()[last], b'.');
        }
    }
}
