//! The part of an answer in which a model thinks first, its reasoning: how families of models mark
//! it, and how clients choose it.

use serde_json::{Map, Value};

/// The texts between which a family of models thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingMarks {
    pub open: &'static str,
    pub close: &'static str,
    /// Is in the templates of these families and in no others.
    pub sign: &'static str,
}

pub(crate) const FAMILIES: [ThinkingMarks; 5] = [
    // Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5, OLMo 3 and many others.
    ThinkingMarks { open: "<think>", close: "</think>", sign: "</think>" },
    // Magistral.
    ThinkingMarks { open: "[THINK]", close: "[/THINK]", sign: "[/THINK]" },
    // Seed-OSS.
    ThinkingMarks { open: "<seed:think>", close: "</seed:think>", sign: "</seed:think>" },
    // Gemma 4.
    ThinkingMarks { open: "<|channel>thought\n", close: "<channel|>", sign: "<channel|>" },
    CHANNEL_THOUGHT,
];

/// GPT-OSS, whose thoughts are messages in a channel.
pub(crate) const CHANNEL_THOUGHT: ThinkingMarks = ThinkingMarks {
    open: "<|channel|>analysis<|message|>",
    close: "<|end|>",
    sign: "<|channel|>analysis<|message|>",
};

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

/// What an answer begins with where its model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingStart {
    pub marks: ThinkingMarks,
    /// The prompt ends with the opening mark.
    pub opened: bool,
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

    /// The variables that a template takes it from, of those that it `reads`; `None` when it has
    /// no such switch. A template that only turns thinking on and off knows no degrees.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn effort_is_in_the_words_of_the_template() {
        let check = |word: &str, names: &[&str], expect: Value| {
            let effort = ThinkingEffort::of(word).unwrap();
            let set = effort.variables(|name| names.contains(&name));
            assert_eq!(set.map_or(Value::Null, Value::Object), expect, "{word} {names:?}");
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
        check("<|start|>assistant<|channel|>analysis<|message|>", Some(CHANNEL_THOUGHT.open));
        check("<|assistant|>{{ content }}<|end|>", None);
        check("{{ 'I think' }}", None);
    }
}
