//! The part of an answer in which a model thinks before it answers: how families of models mark it,
//! and how it is told from the answer while tokens come.

use crate::reader::channels;
use serde_json::{Map, Value};

/// The texts between which a family of models thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingMarks {
    pub open: &'static str,
    pub close: &'static str,
    /// Stands in the templates of these families and in no others.
    pub(crate) sign: &'static str,
}

const FAMILIES: [ThinkingMarks; 5] = [
    // Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5, OLMo 3 and many others.
    ThinkingMarks { open: "<think>", close: "</think>", sign: "</think>" },
    // Magistral.
    ThinkingMarks { open: "[THINK]", close: "[/THINK]", sign: "[/THINK]" },
    // Seed-OSS.
    ThinkingMarks { open: "<seed:think>", close: "</seed:think>", sign: "</seed:think>" },
    // Gemma 4.
    ThinkingMarks { open: "<|channel>thought\n", close: "<channel|>", sign: "<channel|>" },
    // GPT-OSS.
    channels::THOUGHT,
];

/// Variables with which templates turn thinking on and off.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// The variable of templates that know degrees of thinking.
const DEGREE: &str = "reasoning_effort";

impl ThinkingMarks {
    /// The marks that a template's source names.
    pub fn named_in(source: &str) -> Option<Self> {
        FAMILIES.into_iter().find(|marks| source.contains(marks.sign))
    }
}

/// How much a client wants a model to think, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkingEffort {
    /// Not at all.
    Off,
    Degree(&'static str),
}

impl ThinkingEffort {
    pub const WORDS: [&'static str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

    pub fn of(word: &str) -> Option<Self> {
        let known = Self::WORDS.into_iter().find(|known| *known == word)?;
        Some(if known == "none" { Self::Off } else { Self::Degree(known) })
    }

    /// The variables that tell it to a template which reads `names`; `None` when the template has
    /// no such switch. A template that only turns thinking on and off does not tell degrees apart.
    pub fn variables(self, reads: impl Fn(&str) -> bool) -> Option<Map<String, Value>> {
        let switch = SWITCHES.into_iter().find(|name| reads(name));
        let (name, value) = match (self, switch) {
            (Self::Degree(word), _) if reads(DEGREE) => (DEGREE, word.into()),
            (Self::Off, None) if reads(DEGREE) => (DEGREE, "none".into()),
            (_, Some(switch)) => (switch, Value::Bool(self != Self::Off)),
            (_, None) => return None,
        };
        Some(Map::from_iter([(name.to_owned(), value)]))
    }
}

/// Tells thinking from answering. White space around the marks belongs to the marks.
#[derive(Clone, Debug)]
pub struct ThoughtReader {
    marks: ThinkingMarks,
    state: ThoughtState,
    /// Received, and not yet known to be one or the other.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThoughtState {
    /// Nothing but white space came, and perhaps a part of the opening mark.
    Before,
    /// No text of the thought was shown yet.
    Opened,
    Thinking,
    /// The closing mark came, and no text after it.
    Closed,
    Answering,
}

/// Text that became certain, of the thought and of what follows it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ThoughtStep {
    pub thought: String,
    pub answer: String,
}

impl ThoughtReader {
    /// The reader of an answer whose prompt ends with the opening mark, or does not.
    pub fn new(marks: ThinkingMarks, opened: bool) -> Self {
        let state = if opened { ThoughtState::Opened } else { ThoughtState::Before };
        Self { marks, state, held: String::new() }
    }

    pub fn is_thinking(&self) -> bool {
        matches!(self.state, ThoughtState::Opened | ThoughtState::Thinking)
    }

    pub fn push(&mut self, text: &str) -> ThoughtStep {
        self.held.push_str(text);
        let mut step = ThoughtStep::default();
        while self.advance(&mut step) {}
        step
    }

    /// What was held back, once nothing follows. A part of a mark is text then.
    pub fn finish(&mut self) -> ThoughtStep {
        let held = std::mem::take(&mut self.held);
        match self.state {
            ThoughtState::Opened => {
                ThoughtStep { thought: held.trim().to_owned(), ..ThoughtStep::default() }
            }
            ThoughtState::Thinking => {
                ThoughtStep { thought: held.trim_end().to_owned(), ..ThoughtStep::default() }
            }
            ThoughtState::Closed => ThoughtStep::default(),
            ThoughtState::Before | ThoughtState::Answering => {
                ThoughtStep { answer: held, ..ThoughtStep::default() }
            }
        }
    }

    /// Does one step; false when more text is needed.
    fn advance(&mut self, step: &mut ThoughtStep) -> bool {
        match self.state {
            ThoughtState::Before => self.look_for_opening(),
            ThoughtState::Opened | ThoughtState::Closed => self.skip_space(),
            ThoughtState::Thinking => self.think(&mut step.thought),
            ThoughtState::Answering => {
                step.answer.push_str(&std::mem::take(&mut self.held));
                false
            }
        }
    }

    fn look_for_opening(&mut self) -> bool {
        let open = self.marks.open.trim_end();
        let visible = self.held.trim_start();
        if let Some(rest) = visible.strip_prefix(open) {
            self.held = rest.to_owned();
            self.state = ThoughtState::Opened;
            return true;
        }
        let may_open = open.starts_with(visible);
        if !may_open {
            self.state = ThoughtState::Answering;
        }
        !may_open
    }

    fn skip_space(&mut self) -> bool {
        self.held = self.held.trim_start().to_owned();
        let has_text = !self.held.is_empty();
        if has_text {
            let thinks = self.state == ThoughtState::Opened;
            self.state = if thinks { ThoughtState::Thinking } else { ThoughtState::Answering };
        }
        has_text
    }

    fn think(&mut self, thought: &mut String) -> bool {
        if let Some((before, after)) = self.held.split_once(self.marks.close) {
            thought.push_str(before.trim_end());
            self.held = after.to_owned();
            self.state = ThoughtState::Closed;
            return true;
        }
        let certain = self.held.len() - beginning_at_end(&self.held, self.marks.close);
        let certain = self.held[..certain].trim_end().len();
        thought.extend(self.held.drain(..certain));
        false
    }
}

/// The length of the longest end of `text` that is a beginning of `mark`.
pub(crate) fn beginning_at_end(text: &str, mark: &str) -> usize {
    let ends = mark.char_indices().map(|(at, _)| at).rev();
    ends.into_iter().find(|length| text.ends_with(&mark[..*length])).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The thought and the answer of pieces, and what was held back to the end of each.
    fn read(opened: bool, pieces: &[&str]) -> (String, String) {
        let mut reader = ThoughtReader::new(FAMILIES[0], opened);
        let (mut thought, mut answer) = (String::new(), String::new());
        let steps: Vec<ThoughtStep> = pieces.iter().map(|piece| reader.push(piece)).collect();
        for step in steps.into_iter().chain([reader.finish()]) {
            thought += &step.thought;
            answer += &step.answer;
        }
        (thought, answer)
    }

    #[test]
    fn thought_and_answer_are_the_same_wherever_tokens_are_cut() {
        let check = |opened, text: &str, thought: &str, answer: &str| {
            let expect = (thought.to_owned(), answer.to_owned());
            assert_eq!(read(opened, &[text]), expect, "{text:?}");
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            for &one in &places {
                assert_eq!(read(opened, &[&text[..one], &text[one..]]), expect, "{text:?} {one}");
                for &two in places.iter().filter(|two| **two > one) {
                    let pieces = [&text[..one], &text[one..two], &text[two..]];
                    assert_eq!(read(opened, &pieces), expect, "{text:?} {one} {two}");
                }
            }
            let each: Vec<&str> = text.split_inclusive(|_| true).collect();
            assert_eq!(read(opened, &each), expect, "{text:?} by character");
        };
        check(false, "<think>\na é\n</think>\n\nb\n", "a é", "b\n");
        check(false, " \n<think>a</think>b", "a", "b");
        check(false, "plain", "", "plain");
        check(false, " <thin air", "", " <thin air");
        check(false, "<think", "", "<think");
        check(false, "a <think>b</think>", "", "a <think>b</think>");
        check(false, "<think></think>b", "", "b");
        check(false, "<think>a </thinking </think> b </think>", "a </thinking", "b </think>");
        check(true, "\na\n</think>\nb", "a", "b");
        check(true, "a", "a", "");
        check(true, "a \n</thi", "a \n</thi", "");
        check(true, "</think>b", "", "b");
        check(true, "\n\n</think>\n\n", "", "");
        check(true, "", "", "");
    }

    #[test]
    fn nothing_of_a_mark_is_shown_before_it_is_known_to_be_none() {
        let mut reader = ThoughtReader::new(FAMILIES[0], true);
        assert_eq!(reader.push("a \n</th").thought, "a");
        assert_eq!(reader.push("x").thought, " \n</thx");
        assert_eq!(reader.push("</think").thought, "");
        assert!(reader.is_thinking());
        let step = reader.push("> b");
        assert_eq!((step.thought.as_str(), step.answer.as_str()), ("", "b"));
        assert!(!reader.is_thinking());
    }

    #[test]
    fn effort_is_told_in_the_words_of_the_template() {
        let check = |word: &str, names: &[&str], expect: Value| {
            let effort = ThinkingEffort::of(word).unwrap();
            let told = effort.variables(|name| names.contains(&name));
            assert_eq!(told.map_or(Value::Null, Value::Object), expect, "{word} {names:?}");
        };
        check("none", &["enable_thinking"], json!({ "enable_thinking": false }));
        check("low", &["enable_thinking"], json!({ "enable_thinking": true }));
        check("none", &["thinking"], json!({ "thinking": false }));
        check("low", &["reasoning_effort"], json!({ "reasoning_effort": "low" }));
        check("none", &["reasoning_effort"], json!({ "reasoning_effort": "none" }));
        check("high", &["reasoning_effort", "thinking"], json!({ "reasoning_effort": "high" }));
        check("none", &["reasoning_effort", "thinking"], json!({ "thinking": false }));
        check("high", &[], Value::Null);
        assert_eq!(ThinkingEffort::of("much"), None);
    }

    #[test]
    fn families_are_known_by_their_templates() {
        let check = |source: &str, open: Option<&str>| {
            assert_eq!(ThinkingMarks::named_in(source).map(|marks| marks.open), open, "{source}");
        };
        check("{{ content.split('</think>')[-1] }}", Some("<think>"));
        check("[THINK]{{ thought }}[/THINK]", Some("[THINK]"));
        check("<|channel>thought\n<channel|>", Some("<|channel>thought\n"));
        check("<|start|>assistant<|channel|>analysis<|message|>", Some(channels::THOUGHT.open));
        check("<|assistant|>{{ content }}<|end|>", None);
        check("{{ 'I think' }}", None);
    }
}
