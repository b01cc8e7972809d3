//! Guesses the next tokens of sequences, so that one step computes several tokens of each. Pure.
//!
//! A guessed token is called a draft. The step computes the logits before and behind every draft
//! and samples each of them as it would without drafts, where a draw depends on the text, the seed
//! and the position alone. A draft counts if it is the token that was drawn, so drafts change no
//! token; wrong ones cost time only.
//!
//! Drafts come from the sequence's own text ("prompt lookup decoding", Saxena, 2023): where its
//! last tokens stood before, what followed them there is expected again. How many are tried
//! follows from how many were right in this sequence, and from the measured cost of a step.
//!
//! Tried and left out, with Qwen2.5-Coder-1.5B (Q4_K_M) on two cores, where a step of one token
//! takes 30 ms and each further one about 10, on five prompts that ask for quotations: matches of
//! two tokens (median gain 1.30 in place of 1.49), and an estimate for each four lengths of a match
//! (1.33, though 1.13 and 1.20 where one estimate gave 1.10 and 1.11).

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

/// The drafts of one sequence.
#[derive(Debug, Default)]
pub struct Drafts {
    /// Those of the row in flight.
    tokens: Vec<u32>,
    /// How many of `tokens` were drawn.
    accepted: usize,
    /// Drafts that were compared, and those of them that were drawn; both fade.
    compared: f64,
    right: f64,
}

impl Drafts {
    /// Looks for at most `most` tokens that may follow `text`, as many as are worth `price`: what a
    /// draft costs, as a share of what a token of this sequence costs without drafts.
    pub fn look_up(&mut self, text: &[u32], most: usize, price: f64) -> &[u32] {
        self.clear();
        self.compared *= FADE_BY_STEP;
        self.right *= FADE_BY_STEP;
        let chance = (self.right + PRIOR_CHANCE * PRIOR_WEIGHT) / (self.compared + PRIOR_WEIGHT);
        // A draft is of use only if those before it are right too.
        let mut gains = std::iter::successors(Some(chance), |gain| Some(gain * chance));
        let worth = gains.by_ref().take(most).take_while(|gain| *gain > price).count();
        if worth > 0 {
            find_again(text, worth, &mut self.tokens);
        }
        &self.tokens
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.accepted = 0;
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Compares the token that was drawn with the draft in its place. True when they are the same:
    /// then the next result is a token too.
    pub fn accept(&mut self, token: u32) -> bool {
        let Some(draft) = self.tokens.get(self.accepted) else { return false };
        let right = *draft == token;
        self.compared = self.compared * FADE_BY_DRAFT + 1.0;
        self.right = self.right * FADE_BY_DRAFT + f64::from(u8::from(right));
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
pub struct StepCosts {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
}

impl StepCosts {
    /// Counts a step that computed one token of each of its sequences, and their drafts.
    pub fn record(&mut self, tokens: usize, spent: Duration) {
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
    /// tokens costs. From 1 on, no draft pays.
    pub fn price(&self, rows: usize) -> f64 {
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
        slope * rows as f64 / (seconds + slope * (rows as f64 - tokens))
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
        assert!((cheap.price(1) - 2.0 / 42.0).abs() < 0.01, "{}", cheap.price(1));
        // Arithmetic takes all of it: what a draft may save is what it costs.
        let dear = costs(&[16, 20], |tokens| 0.008 * tokens);
        assert!(dear.price(16) > 0.9, "{}", dear.price(16));
        // Nothing but single tokens tells nothing: what is assumed holds again.
        let alone = costs(&[1], |_| 0.040);
        assert!((alone.price(1) - PRIOR_SLOPE).abs() < 1e-3, "{}", alone.price(1));
        // Drafts that seemed to cost nothing still cost something.
        assert!(costs(&[1, 9], |tokens| 0.1 / tokens).price(1) > 0.0);
    }
}
