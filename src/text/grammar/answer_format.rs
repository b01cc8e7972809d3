//! Formats that an answer keeps to, in the terms of the crate llguidance.

use super::gbnf;
use super::schema::{
    SchemaRefused, TOO_COSTLY, Terminals, Writing, fault_of_expression, parts_of, prepare,
    reason_in,
};
use super::tagged_text::{TagContent, TaggedText};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};
use std::sync::Arc;

/// What an answer keeps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// A JSON value that this schema allows.
    Schema(SchemaFormat),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in the Lark syntax that llguidance documents.
    Lark(String),
    /// A text of this grammar, in llama.cpp's language.
    Gbnf(String),
    /// Any text, with parts that keep to formats.
    Tagged(Box<TaggedText>),
    /// A text of this grammar, in which `@part_0`, `@part_1` and so on are formats.
    Nested { grammar: String, parts: Vec<AnswerFormat> },
}

/// A JSON schema that an answer keeps to.
#[derive(Clone, Debug, Default)]
pub struct SchemaFormat {
    /// The schema, with its members in the order in which the answer has them.
    pub text: String,
    /// The schema with its rules rewritten, where that was done before.
    pub(super) simplified: Option<Arc<Value>>,
    /// The expression of what stands between the parts of JSON, where it is not the usual one.
    /// Empty: nothing.
    pub white_space: Option<String>,
    /// Objects that name members have no others, whatever the setting says.
    pub closed: bool,
}

impl SchemaFormat {
    fn members(&self) -> (&str, Option<&str>, bool) {
        (&self.text, self.white_space.as_deref(), self.closed)
    }
}

impl PartialEq for SchemaFormat {
    fn eq(&self, other: &Self) -> bool {
        self.members() == other.members()
    }
}

impl Eq for SchemaFormat {}

impl<T: Into<String>> From<T> for SchemaFormat {
    fn from(text: T) -> Self {
        Self { text: text.into(), ..Self::default() }
    }
}

/// Why a format is not honoured, in words that a client may see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatRefused(pub String);

/// What the library says of formats that are beyond its limits.
const TOO_MUCH: [&str; 5] = ["too many", "Too many", "too big", "fuel", "items; max is"];
const ONE_OF: &str = "has a oneOf whose schemas may hold at once, which cannot be kept to: \
    use anyOf";

impl AnswerFormat {
    /// A text of each format, one behind the other.
    pub fn sequence(parts: Vec<Self>) -> Self {
        Self::joined(parts, " ")
    }

    /// A text of any of these formats.
    pub fn either(parts: Vec<Self>) -> Self {
        Self::joined(parts, " | ")
    }

    fn joined(parts: Vec<Self>, between: &str) -> Self {
        let names: Vec<String> = (0..parts.len()).map(|at| format!("@part_{at}")).collect();
        Self::Nested { grammar: format!("start: {}", names.join(between)), parts }
    }

    /// A text of a grammar, in Lark or in llama.cpp's language.
    pub fn of_grammar(grammar: String) -> Self {
        if gbnf::is_gbnf(&grammar) { Self::Gbnf(grammar) } else { Self::Lark(grammar) }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Schema(SchemaFormat { text, .. })
            | Self::Regex(text)
            | Self::Lark(text)
            | Self::Gbnf(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::Tagged(tagged) => tagged.format().bytes(),
            Self::Nested { grammar, parts } => {
                grammar.len() + parts.iter().map(Self::bytes).sum::<usize>()
            }
        }
    }

    /// The format as it is told from others, without what only spares work.
    pub(super) fn key(&self) -> Self {
        match self {
            Self::Schema(schema) => {
                Self::Schema(SchemaFormat { simplified: None, ..schema.clone() })
            }
            Self::Nested { grammar, parts } => Self::Nested {
                grammar: grammar.clone(),
                parts: parts.iter().map(Self::key).collect(),
            },
            other => other.clone(),
        }
    }

    /// The grammar for the library. Numbers that it would round are put into `terminals`.
    pub(super) fn grammar(
        &self,
        writing: Writing,
        terminals: &mut Terminals,
    ) -> Result<TopLevelGrammar, FormatRefused> {
        Ok(match self {
            Self::Schema(schema) => {
                TopLevelGrammar::from_json_schema(prepare(schema, writing, terminals)?)
            }
            Self::Regex(expression) => {
                // Classes are ASCII, as in patterns of schemas.
                let expression = llguidance::regex_to_lark(expression, "dws");
                TopLevelGrammar::from_lark(format!("start: /{expression}/"))
            }
            Self::Choice(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Self::Gbnf(grammar) => TopLevelGrammar::from_lark(lark_of(grammar)?),
            Self::Tagged(tagged) => tagged.format().grammar(writing, terminals)?,
            Self::Nested { grammar, parts } => nested(grammar, parts, writing, terminals)?,
        })
    }

    /// The formats inside this one, with their places in a schema.
    pub(super) fn parts(&self) -> Vec<(String, Self)> {
        match self {
            Self::Schema(schema) => {
                let parts = parts_of(&schema.text).into_iter();
                parts.map(|(place, part)| (place, Self::Schema(part.into()))).collect()
            }
            Self::Tagged(tagged) => tagged.format().parts(),
            Self::Nested { parts, .. } => {
                parts.iter().map(|part| (String::new(), part.clone())).collect()
            }
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) | Self::Gbnf(_) => Vec::new(),
        }
    }

    /// Whether this format, or one inside it, is such a one.
    pub(super) fn has(&self, is_such: &dyn Fn(&Self) -> bool) -> bool {
        let inside = |format: &Self| format.has(is_such);
        is_such(self)
            || match self {
                Self::Tagged(tagged) => tagged.tags.iter().any(|tag| match &tag.content {
                    TagContent::Format(format) => inside(format),
                    TagContent::Text => false,
                }),
                Self::Nested { parts, .. } => parts.iter().any(inside),
                _ => false,
            }
    }

    /// Whether there may be numbers whose decimals were bounded, or objects whose members were.
    pub(super) fn may_be_bounded(&self) -> bool {
        self.has(&|format| match format {
            Self::Schema(schema) => {
                ["number", "object"].iter().any(|word| schema.text.contains(word))
            }
            _ => false,
        })
    }

    /// Whether a client wrote its rules, which may lead back to themselves for ever.
    pub(super) fn has_rules(&self) -> bool {
        self.has(&|format| matches!(format, Self::Lark(_) | Self::Gbnf(_)))
    }

    /// The refusal of a rule that no finite text keeps to. Clients know rules in Lark by name.
    pub(super) fn endless(&self, rule: &str) -> FormatRefused {
        let rule = match self {
            Self::Lark(_) => format!("the rule {rule}"),
            _ => "one of its rules".into(),
        };
        FormatRefused(format!("cannot be kept to: {rule} leads back to itself without an end"))
    }

    /// The library's reason, where its words are about the format; others name its own parts.
    pub(super) fn refusal(&self, why: &str) -> FormatRefused {
        if let Self::Regex(expression) = self
            && let Some(why) = fault_of_expression(expression)
        {
            return FormatRefused(format!("cannot be kept to: {why}"));
        }
        let line = reason_in(why);
        if TOO_MUCH.iter().any(|words| line.contains(words)) {
            return FormatRefused::costly();
        }
        if line == "NoExtensionBias" {
            return FormatRefused("cannot be kept to: no text keeps to it".into());
        }
        // Words about the library's own parts tell a client nothing.
        let own = ["panic", "lexer", "grammar", "::", "fuel"];
        let shown = match self {
            Self::Schema(_) if line.starts_with("oneOf") => {
                return FormatRefused(ONE_OF.into());
            }
            Self::Schema(_) => !line.is_empty() && !own.iter().any(|word| line.contains(word)),
            Self::Regex(_) | Self::Lark(_) => !line.is_empty() && !line.contains("panic"),
            _ => false,
        };
        let text = if shown { &line } else { "it is too complex, or uses what is not supported" };
        FormatRefused(format!("cannot be kept to: {text}"))
    }
}

fn lark_of(gbnf: &str) -> Result<String, FormatRefused> {
    gbnf::to_lark(gbnf).map_err(|why| FormatRefused(format!("cannot be kept to: {why}")))
}

/// A grammar with its parts. Those of a part that has parts itself get names of their own.
fn nested(
    grammar: &str,
    parts: &[AnswerFormat],
    writing: Writing,
    terminals: &mut Terminals,
) -> Result<TopLevelGrammar, FormatRefused> {
    let mut whole = TopLevelGrammar::from_lark(grammar.to_owned());
    for (at, part) in parts.iter().enumerate() {
        let has_parts = matches!(part, AnswerFormat::Nested { .. } | AnswerFormat::Tagged(_));
        for mut grammar in part.grammar(writing, terminals)?.grammars {
            let name = grammar.name.as_deref().unwrap_or_default();
            let inner = name.strip_prefix("part_").map(|inner| format!("_{inner}"));
            let inner = inner.unwrap_or_default();
            if let Some(lark) = grammar.lark_grammar.as_mut().filter(|_| has_parts) {
                *lark = lark.replace("@part_", &format!("@part_{at}_"));
            }
            let name = Some(format!("part_{at}{inner}"));
            whole.grammars.push(GrammarWithLexer { name, ..grammar });
        }
    }
    Ok(whole)
}

impl FormatRefused {
    /// The refusal of a format whose masks, or whose compilation, cost too much.
    pub(super) fn costly() -> Self {
        Self(format!("cannot be kept to: {TOO_COSTLY}"))
    }
}

impl From<SchemaRefused> for FormatRefused {
    fn from(refused: SchemaRefused) -> Self {
        Self(refused.to_string())
    }
}
