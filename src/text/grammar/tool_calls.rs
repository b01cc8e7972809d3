//! The grammar of an answer with tool calls, by the form of the model's family.

use super::answer_format::{AnswerFormat, FormatRefused};
use super::lark::{LarkGrammar, SPACE};
use super::parameters::UnkeptRules;
use super::{literals, tagged};
use crate::forms::channels;
use crate::forms::reasoning::{CHANNEL_THOUGHT, ThinkingStart};
use crate::forms::tool_calls::{ArgumentSyntax, CallForm, CallId, ToolDefinition};
use crate::tokenizer::SpecialTokens;
use std::fmt::Write;

/// Which calls an answer may or must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// An answer without a call is none.
    pub required: bool,
    /// The only function that may be called.
    pub only: Option<String>,
    /// Most calls in one answer.
    pub most: usize,
}

impl CallForm {
    /// The format of an answer that calls `tools` by the rule.
    pub(crate) fn format(
        &self,
        tools: &[ToolDefinition],
        rule: &CallRule,
        thinking: Option<ThinkingStart>,
        marks: &SpecialTokens,
    ) -> Result<AnswerFormat, FormatRefused> {
        let mut grammar = LarkGrammar::new(marks);
        let called = |tool: &&ToolDefinition| rule.only.as_ref().is_none_or(|n| *n == tool.name);
        let mut names = Vec::new();
        for (at, tool) in tools.iter().enumerate().filter(|(_, tool)| called(tool)) {
            self.add_tool(&mut grammar, at, tool)?;
            names.push(format!("call_{at}"));
        }
        let thought = if self.in_channels {
            grammar.messages_before(&[CHANNEL_THOUGHT.open, channels::PREAMBLE])
        } else {
            grammar.thought(thinking)
        };
        let text = if self.at_start { r"/(?s:\s*[^\s{].*)/" } else { "/(?s:.+)/" };
        let _ = writeln!(grammar.rules, "call: {}\ntext: {text}", names.join(" | "));
        let [open, separator, close] =
            [self.open, self.separator, self.close].map(|text| grammar.literal(text));
        let more = match rule.most.min(self.most) {
            0 | 1 => String::new(),
            most => format!("({separator} call){{0,{}}}", most - 1),
        };
        let _ = writeln!(grammar.rules, "calls: {open} call {more} {close}\n{SPACE}");
        let answer = match (rule.required, self.at_start) {
            (true, _) if self.in_channels => "calls",
            (false, _) if self.in_channels => {
                let last = grammar.literal(channels::FINAL);
                let _ = writeln!(grammar.rules, "last: {last} text?");
                "(calls | last)"
            }
            (true, _) if thinking.is_some() => "space calls",
            (true, _) => "calls",
            (false, true) => "(space calls | text)?",
            (false, false) => "text? calls?",
        };
        Ok(grammar.starting_with(&format!("{thought} {answer}")))
    }

    /// The rules that calls of these tools are not kept to: the place of each tool, and the JSON
    /// pointer of the rule in its schema.
    pub(crate) fn left_out(
        &self,
        tools: &[ToolDefinition],
        marks: &SpecialTokens,
    ) -> Vec<(usize, String)> {
        let mut grammar = LarkGrammar::new(marks);
        let mut of_tool = |at, tool| self.add_tool(&mut grammar, at, tool).unwrap_or_default();
        let tools = tools.iter().enumerate();
        let all = tools.map(|(at, tool)| (at, of_tool(at, tool)));
        all.flat_map(|(at, rules)| rules.into_iter().map(move |rule| (at, rule))).collect()
    }

    /// Adds the rule of a tool's calls, and returns the places of rules that were left out.
    fn add_tool(
        &self,
        grammar: &mut LarkGrammar,
        at: usize,
        tool: &ToolDefinition,
    ) -> Result<Vec<String>, FormatRefused> {
        let mut unkept = UnkeptRules::of(tool);
        let name = grammar.literal(&format!("{}{}", self.before, tool.name));
        let [middle, after] = [self.middle, self.after].map(|text| grammar.literal(text));
        let arguments = match self.arguments {
            ArgumentSyntax::Json => {
                grammar.part(AnswerFormat::Schema(tool.parameters.as_str().into()))
            }
            ArgumentSyntax::Tagged(tags) => tagged::rule(tags, grammar, at, tool, &mut unkept)?,
            ArgumentSyntax::Literals(syntax) => {
                literals::rule(syntax, grammar, at, tool, &mut unkept)?
            }
        };
        let [ahead, behind] = self.id_rules(grammar);
        let call = [&name, &ahead, &middle, &arguments, &behind, &after].map(String::as_str);
        let _ = writeln!(grammar.rules, "call_{at}: {}", call.join(" "));
        Ok(unkept.left_out)
    }

    /// The rules of what may follow the name, and the arguments.
    fn id_rules(&self, grammar: &LarkGrammar) -> [String; 2] {
        const ID: &str = "/[a-zA-Z0-9]{9}/";
        match self.id {
            CallId::None => [const { String::new() }; 2],
            CallId::BehindName(mark) => {
                [format!("({} {ID})?", grammar.literal(mark)), String::new()]
            }
            CallId::BehindArguments(mark) => {
                [String::new(), format!("({} {ID} \"\\\"\")?", grammar.literal(mark))]
            }
        }
    }
}
