//! Free text with parts that keep to formats: a part begins where the text comes to a trigger.

use super::answer_format::AnswerFormat;
use super::lark::{LarkGrammar, expression};
use crate::tokenizer::SpecialTokens;
use std::fmt::Write;

/// Any text, in which parts between two fixed texts keep to formats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaggedText {
    /// Texts with which some tag begins. Behind one of them the text goes on as a tag does.
    pub triggers: Vec<String>,
    pub tags: Vec<FormatTag>,
    pub at_least_one: bool,
    /// The answer ends behind the first tag.
    pub stop_after_first: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatTag {
    pub begin: String,
    pub content: TagContent,
    pub end: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagContent {
    Format(AnswerFormat),
    /// Any text up to the tag's end.
    Text,
}

impl TaggedText {
    /// The first tag that begins with no trigger, or trigger with which no tag begins.
    pub fn fault(&self) -> Option<&str> {
        let begins = |tag: &FormatTag, trigger: &String| tag.begin.starts_with(trigger.as_str());
        let mut lost =
            self.tags.iter().filter(|tag| !self.triggers.iter().any(|it| begins(tag, it)));
        let mut idle =
            self.triggers.iter().filter(|it| !self.tags.iter().any(|tag| begins(tag, it)));
        lost.next().map(|tag| tag.begin.as_str()).or_else(|| idle.next().map(String::as_str))
    }

    /// The texts of tags are letters, also where the tokenizer has a mark that is written alike.
    pub(super) fn format(&self) -> AnswerFormat {
        let none = SpecialTokens::new(Vec::new());
        let mut grammar = LarkGrammar::new(&none);
        let mut heads = Vec::new();
        for (at, trigger) in self.triggers.iter().enumerate() {
            let tags = self.tags.iter().enumerate();
            let behind =
                tags.filter_map(|(n, tag)| Some((n, tag, tag.begin.strip_prefix(trigger)?)));
            let behind: Vec<String> = behind
                .map(|(n, tag, rest)| tag.rule(&mut grammar, &format!("{at}_{n}"), rest))
                .collect();
            let ends = expression(trigger);
            let _ = writeln!(grammar.rules, "head_{at}[lazy]: /(?s:.*){ends}/");
            let _ = writeln!(grammar.rules, "tags_{at}: {}", behind.join(" | "));
            heads.push(format!("head_{at} tags_{at}"));
        }
        let ends: Vec<String> = self.triggers.iter().map(|it| expression(it)).collect();
        let _ = writeln!(grammar.rules, "TEXT: /(?s:.+)/ & ~/(?s:.*)({})(?s:.*)/", ends.join("|"));
        grammar.starting_with(&self.start(&heads.join(" | ")))
    }

    fn start(&self, heads: &str) -> String {
        match (self.at_least_one, self.stop_after_first) {
            (false, false) => format!("({heads})* TEXT?"),
            (true, false) => format!("({heads})+ TEXT?"),
            (false, true) => format!("({heads}) | TEXT?"),
            (true, true) => heads.to_owned(),
        }
    }
}

impl FormatTag {
    /// A tag by itself, for formats that are made of others.
    pub fn alone(self) -> AnswerFormat {
        let none = SpecialTokens::new(Vec::new());
        let mut grammar = LarkGrammar::new(&none);
        let begin = self.begin.clone();
        let start = self.rule(&mut grammar, "alone", &begin);
        grammar.starting_with(&start)
    }

    /// The tag from `rest` of its beginning on.
    fn rule(&self, grammar: &mut LarkGrammar, name: &str, rest: &str) -> String {
        let fixed = |text: &str| match text {
            "" => String::new(),
            text => LarkGrammar::plain(text),
        };
        let content = match &self.content {
            TagContent::Format(format) => {
                format!("{} {}", grammar.part(format.clone()), fixed(&self.end))
            }
            TagContent::Text if self.end.is_empty() => "/(?s:.*)/".into(),
            TagContent::Text => grammar.text_until(&format!("until_{name}"), &self.end),
        };
        format!("{} {content}", fixed(rest))
    }
}
