//! Guesses the next tokens of sequences, so that one step computes several tokens of each. Pure.
//!
//! A guessed token is called a draft. The step computes the logits before and behind every draft
//! and samples each of them as it would without drafts, where a draw depends on the text, the seed
//! and the position alone. A draft counts if it is the token that was drawn, so drafts change no
//! token; wrong ones cost time only.
//!
//! Drafts come from the sequence's own text ("prompt lookup decoding", Saxena, 2023): where its
//! last tokens stood before, what followed them there is expected again. Where nothing recurs, a
//! [`Proposer`] may be asked: a smaller model, or a head of the model itself. How many are tried
//! follows from how many were right in this sequence, and from the measured costs of a step and of
//! a draft.
//!
//! Tried and left out, with Qwen2.5-Coder-1.5B (Q4_K_M) on two cores, where a step of one token
//! takes 30 ms and each further one about 10, on five prompts that ask for quotations: matches of
//! two tokens (median gain 1.30 in place of 1.49), and an estimate for each four lengths of a match
//! (1.33, though 1.13 and 1.20 where one estimate gave 1.10 and 1.11).

use super::sequence_id::SequenceId;
use cresset_kernels::sampling::params::RowSampling;
use std::time::Duration;

/// So many tokens at the end of the text must have stood before. Fewer recur by chance.
const SHORTEST_MATCH: usize = 3;
/// A match of this length is as good as a longer one, and ends the search.
const LONGEST_MATCH: usize = 16;
/// What is assumed of a sequence before any draft was compared: this share of drafts is right. It
/// weighs as much as `PRIOR_WEIGHT` drafts.
const PRIOR_CHANCE: f64 = 0.6;
const PRIOR_WEIGHT: f64 = 1.0;
/// By how much earlier drafts count less with each that is compared: a sequence that stops to
/// repeat itself is noticed within twenty wrong ones.
const FADE_BY_DRAFT: f64 = 0.9;
/// By how much earlier drafts count less with each step. Drafts that did not pay are tried again
/// some time later, and lose at most this share of a step's time if they never do.
const FADE_BY_STEP: f64 = 0.99;

/// The same with each step, of all drafts of the proposer. Trying it again costs more: it has to
/// catch up with the texts.
const FADE_BY_PROPOSAL: f64 = 0.999;

/// A sequence for which a proposer is asked.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub id: SequenceId,
    /// Its blocks in the first group of layers. All its tokens but the last are computed there.
    pub blocks: Vec<u32>,
    /// The parameters by which its next token will be sampled. Drafts are sampled by them too.
    pub row: RowSampling,
    /// The number of drafts that are worth their cost.
    pub most: usize,
}

/// Guesses the next tokens of texts in which nothing recurs.
pub trait Proposer {
    /// What a draft costs it, seconds, as far as that was measured.
    fn seconds_per_draft(&self) -> f64;

    /// The drafts of each sequence, in order, at most as many as are wanted.
    fn propose(&mut self, wanted: Vec<Wanted>) -> Vec<Vec<u32>>;
}

/// By how much earlier measurements of a proposer count less with each new one.
const FADE_BY_MEASUREMENT: f64 = 0.9;

/// The time that a proposer takes for a draft, as far as it was measured.
#[derive(Debug, Default)]
pub(crate) struct DraftCost {
    /// The mean, seconds; later drafts count more. It is 0 before the first one and infinite after
    /// a failure.
    seconds: f64,
}

impl DraftCost {
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Notes the time of one draft, or the mean time of several, seconds.
    pub(crate) fn note(&mut self, spent: f64) {
        let before = if self.seconds > 0.0 { self.seconds } else { spent };
        self.seconds = before * FADE_BY_MEASUREMENT + spent * (1.0 - FADE_BY_MEASUREMENT);
    }

    /// After a failure no draft is worth its cost any more.
    pub(crate) fn give_up(&mut self) {
        self.seconds = f64::INFINITY;
    }
}

/// How often drafts were right. Earlier ones count less than later ones.
#[derive(Debug, Default)]
pub(crate) struct Estimate {
    compared: f64,
    right: f64,
}

impl Estimate {
    /// The share of drafts that are right. `assumed` is that share before any was compared.
    fn chance(&self, assumed: f64) -> f64 {
        (self.right + assumed * PRIOR_WEIGHT) / (self.compared + PRIOR_WEIGHT)
    }

    fn fade(&mut self, by: f64) {
        self.compared *= by;
        self.right *= by;
    }

    pub(crate) fn note(&mut self, right: bool) {
        self.fade(FADE_BY_DRAFT);
        self.compared += 1.0;
        self.right += f64::from(u8::from(right));
    }

    /// The share of a proposer's drafts that are expected to be right in a new sequence, one step
    /// later.
    pub(crate) fn of_next_step(&mut self) -> f64 {
        self.fade(FADE_BY_PROPOSAL);
        self.chance(PRIOR_CHANCE)
    }
}

/// How many drafts, at most `most`, are worth their price each. One is of use only if those before
/// it are right too.
fn worth(chance: f64, most: usize, price: f64) -> usize {
    let gains = std::iter::successors(Some(chance), |gain| Some(gain * chance));
    gains.take(most).take_while(|gain| *gain > price).count()
}

/// The drafts of one sequence.
#[derive(Debug, Default)]
pub(crate) struct Drafts {
    /// Those of the row in flight.
    tokens: Vec<u32>,
    /// How many of `tokens` were drawn.
    accepted: usize,
    /// Whether `tokens` are a proposer's.
    proposed: bool,
    /// Drafts that the text gave, and those of a proposer.
    from_text: Estimate,
    from_proposer: Estimate,
}

impl Drafts {
    /// Looks for at most `most` tokens that may follow `text`, as many as are worth `price`: what a
    /// draft costs, as a share of what a token of this sequence costs without drafts.
    pub(crate) fn look_up(&mut self, text: &[u32], most: usize, price: f64) -> &[u32] {
        self.clear();
        self.proposed = false;
        self.from_text.fade(FADE_BY_STEP);
        let worth = worth(self.from_text.chance(PRIOR_CHANCE), most, price);
        if worth > 0 {
            find_again(text, worth, &mut self.tokens);
        }
        &self.tokens
    }

    /// How many drafts of a proposer, at most `most`, are worth `price`. `assumed` is the share of
    /// its drafts that are right in other sequences. What did not pay is not tried again in this
    /// sequence.
    pub(crate) fn worth_proposing(&self, most: usize, price: f64, assumed: f64) -> usize {
        worth(self.from_proposer.chance(assumed), most, price)
    }

    /// Takes over a proposer's drafts.
    pub(crate) fn take(&mut self, tokens: Vec<u32>) {
        self.clear();
        (self.tokens, self.proposed) = (tokens, true);
    }

    /// Gives up all drafts but the first `most`.
    pub(crate) fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
    }

    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.accepted = 0;
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether the next token will be compared with a draft of a proposer.
    pub(crate) fn awaits_proposed(&self) -> bool {
        self.proposed && self.accepted < self.tokens.len()
    }

    /// Compares the token that was drawn with the draft in its place. True when they are the same:
    /// then the next result is a token too.
    pub(crate) fn accept(&mut self, token: u32) -> bool {
        let Some(draft) = self.tokens.get(self.accepted) else { return false };
        let right = *draft == token;
        let estimate = if self.proposed { &mut self.from_proposer } else { &mut self.from_text };
        estimate.note(right);
        self.accepted += 1;
        if !right {
            self.clear();
        }
        right
    }
}

/// Writes the `count` tokens that are expected after `text`: those that followed the longest match
/// of its end, the latest of equally long ones. A match that overlaps the end repeats with the
/// period of the overlap. Writes nothing where there is no match.
fn find_again(text: &[u32], count: usize, drafts: &mut Vec<u32>) {
    let end = text.len();
    let (mut longest, mut after) = (SHORTEST_MATCH - 1, end);
    for at in (1..end).rev() {
        let same = text[..at].iter().rev().zip(text.iter().rev());
        let length = same.take(LONGEST_MATCH).take_while(|(a, b)| a == b).count();
        if length > longest {
            (longest, after) = (length, at);
        }
        if longest == LONGEST_MATCH {
            break;
        }
    }
    if after < end {
        let follows = |i: usize, drafts: &[u32]| {
            text.get(after + i).copied().unwrap_or_else(|| drafts[after + i - end])
        };
        for i in 0..count {
            drafts.push(follows(i, drafts));
        }
    }
}

/// Before it is measured, one more token is taken to lengthen a step by this share of a step.
const PRIOR_SLOPE: f64 = 0.1;
/// How much that counts, in squared tokens of measured difference.
const SLOPE_WEIGHT: f64 = 4.0;
/// By how much a step counts less with each later one: steps grow with the texts.
const FADE: f64 = 0.97;

/// The cost of decoding steps by their number of tokens: a straight line through the latest steps,
/// weighted least squares, in seconds.
#[derive(Debug, Default)]
pub(crate) struct StepCosts {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
}

impl StepCosts {
    /// Counts a step that computed one token of each of its sequences, and their drafts.
    pub(crate) fn record(&mut self, tokens: usize, spent: Duration) {
        let (tokens, seconds) = (tokens as f64, spent.as_secs_f64());
        for (sum, value) in [
            (&mut self.weight, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_squared, tokens * tokens),
            (&mut self.tokens_seconds, tokens * seconds),
        ] {
            *sum = *sum * FADE + value;
        }
    }

    /// What a draft costs beside `rows` sequences that decode, as a share of what each of their
    /// tokens costs. From 1 on, no draft pays. `guessing`: the seconds that it cost before its
    /// step.
    pub(crate) fn price(&self, rows: usize, guessing: f64) -> f64 {
        if self.weight <= 0.0 {
            return PRIOR_SLOPE * rows as f64;
        }
        let (tokens, seconds) = (self.tokens / self.weight, self.seconds / self.weight);
        let spread = self.tokens_squared - self.weight * tokens * tokens;
        let joint = self.tokens_seconds - self.weight * tokens * seconds;
        let assumed = PRIOR_SLOPE * seconds / tokens.max(1.0);
        let slope = (joint + SLOPE_WEIGHT * assumed) / (spread + SLOPE_WEIGHT);
        // A line that falls, or reaches zero, is noise of the clock.
        let slope = slope.clamp(0.01 * assumed, seconds / tokens);
        (slope + guessing) * rows as f64 / (seconds + slope * (rows as f64 - tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &[u32], count: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        find_again(text, count, &mut drafts);
        drafts
    }

    #[test]
    fn what_followed_the_longest_and_latest_match_is_expected_again() {
        for (text, drafts) in [
            (&[][..], &[][..]),
            (&[1, 2, 3], &[]),
            (&[1, 2, 9, 1, 2], &[]),
            (&[1, 2, 3, 9, 8, 7, 1, 2, 3], &[9, 8, 7, 1]),
            // The latest of two matches of three.
            (&[1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 0, 1, 2, 3], &[5, 6, 7, 0]),
            // A longer match further back.
            (&[0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 0, 1, 2, 3], &[4, 9, 1, 2]),
            // A text that repeats itself goes on so.
            (&[7, 7, 7, 7], &[7, 7, 7, 7]),
            (&[1, 2, 1, 2, 1, 2], &[1, 2, 1, 2]),
            (&[5, 1, 2, 3, 1, 2, 3, 1, 2], &[3, 1, 2, 3]),
        ] {
            assert_eq!(found(text, 4), drafts, "{text:?}");
        }
        let long: Vec<u32> = (0..1000).chain(500..600).collect();
        assert_eq!(found(&long, 2), [600, 601]);
    }

    /// The number of drafts for a text that repeats itself.
    fn tried(drafts: &mut Drafts, most: usize, price: f64) -> usize {
        drafts.look_up(&[1; 40], most, price).len()
    }

    #[test]
    fn as_many_drafts_are_tried_as_pay() {
        let mut drafts = Drafts::default();
        // 0.6, 0.36 and 0.216 are worth 0.2 each; 0.13 is not.
        assert_eq!([0.2, 0.61].map(|price| tried(&mut drafts, 8, price)), [3, 0]);
        assert_eq!(tried(&mut drafts, 2, 0.2), 2);
        for _ in 0..20 {
            tried(&mut drafts, 8, 0.2);
            while drafts.accept(1) {}
        }
        assert_eq!(tried(&mut drafts, 8, 0.2), 8);
        let wrong = (0..50).filter(|_| tried(&mut drafts, 8, 0.2) > 0 && !drafts.accept(2));
        let wrong = wrong.count();
        assert!((5..30).contains(&wrong), "{wrong} wrong drafts in a row before none was tried");
        let later = (0..200).position(|_| tried(&mut drafts, 8, 0.2) > 0);
        assert!(later.is_some_and(|steps| steps > 10), "tried again after {later:?} steps");
    }

    /// A proposer whose drafts do not come true is soon not asked in a sequence, then in none, and
    /// much later once more.
    #[test]
    fn a_proposer_is_asked_while_it_pays() {
        let mut others = Estimate::default();
        let mut ask = |drafts: &mut Drafts, token: u32| {
            let assumed = others.of_next_step();
            let count = drafts.worth_proposing(8, 0.2, assumed);
            drafts.take(vec![1; count]);
            assert_eq!(drafts.awaits_proposed(), count > 0);
            let mut right = 0;
            while drafts.awaits_proposed() {
                let accepted = drafts.accept(token);
                others.note(accepted);
                right += usize::from(accepted);
            }
            (count, right)
        };
        let mut drafts = Drafts::default();
        assert_eq!(ask(&mut drafts, 1), (3, 3));
        assert_eq!((0..20).map(|_| ask(&mut drafts, 1)).last(), Some((8, 8)));
        let asked = (0..100).filter(|_| ask(&mut drafts, 2).0 > 0).count();
        assert!((2..30).contains(&asked), "asked {asked} times");
        assert_eq!(ask(&mut drafts, 2).0, 0);
        let mut asked = |sequences: usize| {
            (0..sequences).filter(|_| ask(&mut Drafts::default(), 2).0 > 0).count()
        };
        assert!(asked(500) < 10);
        assert!((1..60).contains(&asked(5_000)));
    }

    #[test]
    fn drafts_are_accepted_up_to_the_first_wrong_one() {
        let mut drafts = Drafts::default();
        drafts.look_up(&[1, 2, 3, 1, 2, 3], 4, 0.1);
        assert_eq!(drafts.tokens(), [1, 2, 3, 1]);
        assert_eq!([1, 2, 9, 1].map(|token| drafts.accept(token)), [true, true, false, false]);
        drafts.look_up(&[1, 2, 3, 1, 2, 3], 2, 0.1);
        assert_eq!([1, 2, 3].map(|token| drafts.accept(token)), [true, true, false]);
    }

    /// Costs after steps of `tokens`, each of which takes `seconds(tokens)`.
    fn costs(tokens: &[usize], seconds: fn(f64) -> f64) -> StepCosts {
        let mut costs = StepCosts::default();
        for &tokens in tokens.iter().cycle().take(200) {
            costs.record(tokens, Duration::from_secs_f64(seconds(tokens as f64)));
        }
        costs
    }

    #[test]
    fn a_draft_costs_what_longer_steps_took() {
        // Reading the weights takes most of a step, so a draft costs little beside one sequence.
        let cheap = costs(&[1, 5], |tokens| 0.040 + 0.002 * tokens);
        assert!((cheap.price(1, 0.0) - 2.0 / 42.0).abs() < 0.01, "{}", cheap.price(1, 0.0));
        // A proposer's time comes on top.
        let proposed = cheap.price(1, 0.021) - cheap.price(1, 0.0);
        assert!((proposed - 0.5).abs() < 0.01, "{proposed}");
        // Arithmetic takes all of it: what a draft may save is what it costs.
        let dear = costs(&[16, 20], |tokens| 0.008 * tokens);
        assert!(dear.price(16, 0.0) > 0.9, "{}", dear.price(16, 0.0));
        // Nothing but single tokens tells nothing: what is assumed holds again.
        let alone = costs(&[1], |_| 0.040);
        assert!((alone.price(1, 0.0) - PRIOR_SLOPE).abs() < 1e-3, "{}", alone.price(1, 0.0));
        // Drafts that seemed to cost nothing still cost something.
        assert!(costs(&[1, 9], |tokens| 0.1 / tokens).price(1, 0.0) > 0.0);
    }
}
