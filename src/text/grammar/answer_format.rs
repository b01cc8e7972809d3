//! Formats that an answer keeps to, in the terms of the crate llguidance.

use super::schema::{
    SchemaRefused, Terminals, Writing, fault_of_expression, parts_of, prepare, reason_in,
    set_white_space,
};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::json;

/// What an answer keeps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// A JSON value that this schema allows; its members in the order in which the answer has them.
    Schema(String),
    /// The same, with texts of this expression between its parts, or none.
    SpacedSchema { schema: String, white_space: Option<String> },
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in the Lark syntax that llguidance documents.
    Lark(String),
    /// A text of this grammar, in which `@part_0`, `@part_1` and so on are formats.
    Nested { grammar: String, parts: Vec<AnswerFormat> },
}

/// Why a format is not honoured, in words that a client may see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatRefused(pub String);

const ONE_OF: &str = "has a oneOf whose schemas may hold at once, which cannot be kept to: \
    use anyOf";

impl AnswerFormat {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Schema(text)
            | Self::SpacedSchema { schema: text, .. }
            | Self::Regex(text)
            | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::Nested { grammar, parts } => {
                grammar.len() + parts.iter().map(Self::bytes).sum::<usize>()
            }
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
            Self::SpacedSchema { schema, white_space } => {
                let mut schema = prepare(schema, writing, terminals)?;
                let space = white_space.as_deref();
                if let Some(why) = space.and_then(fault_of_expression) {
                    return Err(FormatRefused(format!("has white space of no expression: {why}")));
                }
                set_white_space(&mut schema, space);
                TopLevelGrammar::from_json_schema(schema)
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
            Self::Nested { grammar, parts } => nested(grammar, parts, writing, terminals)?,
        })
    }

    /// The formats inside this one, with their places in a schema.
    pub(super) fn parts(&self) -> Vec<(String, Self)> {
        match self {
            Self::Schema(schema) | Self::SpacedSchema { schema, .. } => {
                let parts = parts_of(schema).into_iter();
                parts.map(|(place, part)| (place, Self::Schema(part))).collect()
            }
            Self::Nested { parts, .. } => {
                parts.iter().map(|part| (String::new(), part.clone())).collect()
            }
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => Vec::new(),
        }
    }

    /// Whether there may be numbers whose decimals were bounded.
    pub(super) fn names_numbers(&self) -> bool {
        match self {
            Self::Schema(schema) | Self::SpacedSchema { schema, .. } => schema.contains("number"),
            Self::Nested { parts, .. } => parts.iter().any(Self::names_numbers),
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => false,
        }
    }

    /// The library's reason, where its words are about the format; others name its own parts.
    pub(super) fn refusal(&self, why: &str) -> FormatRefused {
        if let Self::Regex(expression) = self
            && let Some(why) = fault_of_expression(expression)
        {
            return FormatRefused(format!("cannot be kept to: {why}"));
        }
        let line = reason_in(why);
        if line == "NoExtensionBias" {
            return FormatRefused("cannot be kept to: no text keeps to it".into());
        }
        // Words about the library's own parts tell a client nothing.
        let own = ["panic", "lexer", "grammar", "::", "fuel"];
        let shown = match self {
            Self::Schema(_) | Self::SpacedSchema { .. } if line.starts_with("oneOf") => {
                return FormatRefused(ONE_OF.into());
            }
            Self::Schema(_) | Self::SpacedSchema { .. } => {
                !line.is_empty() && !own.iter().any(|word| line.contains(word))
            }
            Self::Regex(_) | Self::Lark(_) => !line.is_empty() && !line.contains("panic"),
            Self::Choice(_) | Self::Nested { .. } => false,
        };
        let text = if shown { &line } else { "it is too complex, or uses what is not supported" };
        FormatRefused(format!("cannot be kept to: {text}"))
    }
}

fn nested(
    grammar: &str,
    parts: &[AnswerFormat],
    writing: Writing,
    terminals: &mut Terminals,
) -> Result<TopLevelGrammar, FormatRefused> {
    let mut whole = TopLevelGrammar::from_lark(grammar.to_owned());
    for (at, part) in parts.iter().enumerate() {
        let named =
            |part: GrammarWithLexer| GrammarWithLexer { name: Some(format!("part_{at}")), ..part };
        let part = part.grammar(writing, terminals)?;
        whole.grammars.extend(part.grammars.into_iter().map(named));
    }
    Ok(whole)
}

impl From<SchemaRefused> for FormatRefused {
    fn from(refused: SchemaRefused) -> Self {
        Self(refused.to_string())
    }
}
