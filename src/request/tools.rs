//! Formats, tools and thinking: what a request may ask of its model, and how the answer is made
//! then.

use super::error::RequestError;
use super::generation_input::{AskedFormat, AskedTools, GenerationInput, ToolChoice};
use crate::settings::Plan;
use cresset_catalogue::ProvenCalls;
use cresset_engine::{TokenGrammar, TokenMask};
use cresset_ledger::{Sha256Bytes, TokenDigest};
use cresset_pool::ServedModel;
use cresset_text::{
    self, AnswerReader, CallRule, CompiledGrammar, FormatRefused, GrammarPlace, MOST_CALLS,
    PromptExtras, TextModel, ThinkingEffort, ThinkingStart, ToolDefinition, Unwanted,
};
use serde_json::Value;
use std::sync::Arc;

/// What requests may ask of a model beyond text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Answers that keep to a format.
    Formats,
    /// Calls of tools.
    Tools,
    /// Calls of tools where the request demands them, of a model that was not proven to choose.
    ForcedTools,
    /// What the model thinks is told apart from its answer.
    Reasoning,
}

impl Capability {
    pub const ALL: [Self; 4] = [Self::Formats, Self::Tools, Self::ForcedTools, Self::Reasoning];

    pub fn name(self) -> &'static str {
        match self {
            Self::Formats => "json_schema",
            Self::Tools => "tools",
            Self::ForcedTools => "tools_forced",
            Self::Reasoning => "reasoning",
        }
    }

    /// Whether both the model and the plan have it.
    pub fn holds(self, model: &ServedModel, plan: &Plan) -> bool {
        self.lack(model).is_none() && self.is_in(plan)
    }

    /// Why the model does not have it, if so.
    fn lack(self, model: &ServedModel) -> Option<&'static str> {
        const TEXT_ONLY: &str = "is not supported: this model generates text only; turn tool \
                                 calling off in the client";
        let calls = match model.text.calls {
            Some(_) => model.qualified.proven_calls(),
            None => ProvenCalls::None,
        };
        let (has, why) = match self {
            Self::Formats => return None,
            Self::Tools if calls == ProvenCalls::Forced => (
                false,
                "are not left to this model's choice, because its qualification withheld that: \
                 send `tool_choice` \"required\" or one function, or turn tool calling off in \
                 the client; the node's operator may set qualification.any_tool_choice",
            ),
            Self::Tools => (calls == ProvenCalls::Chosen, TEXT_ONLY),
            Self::ForcedTools => (calls == ProvenCalls::Forced, TEXT_ONLY),
            Self::Reasoning => (
                model.text.thinking.is_some(),
                "is not supported: this model does not think before it answers",
            ),
        };
        (!has).then_some(why)
    }

    fn is_in(self, plan: &Plan) -> bool {
        match self {
            Self::Formats => plan.structured_output,
            Self::Tools | Self::ForcedTools => plan.tools,
            Self::Reasoning => plan.reasoning,
        }
    }

    /// Refuses a field that asks for it, where it is not to be had.
    pub(super) fn check(
        self,
        field: &str,
        model: &ServedModel,
        plan: &Plan,
    ) -> Result<(), RequestError> {
        if !self.is_in(plan) {
            return Err(RequestError::refused(field, "is not part of your plan"));
        }
        self.lack(model).map_or(Ok(()), |why| Err(RequestError::refused(field, why)))
    }
}

impl AskedFormat {
    /// The format's grammar over the model's tokens, which begins when the model has thought, and
    /// behind a raw prompt at once. Blocking, as `TextModel::compile` is.
    fn compile(
        &self,
        text: &TextModel,
        thinking: Option<ThinkingStart>,
        is_raw: bool,
    ) -> Result<Arc<dyn TokenGrammar>, RequestError> {
        let grammar = if is_raw {
            text.compile(&self.format)
        } else {
            text.compile(&text.format_after(&self.format, thinking))
        };
        grammar
            .map(|grammar| Arc::new(AnswerGrammar(grammar)) as Arc<dyn TokenGrammar>)
            .map_err(|FormatRefused(why)| RequestError::refused(self.field, why))
    }
}

impl AskedTools {
    fn rule(&self) -> CallRule {
        let only = match self.choice {
            ToolChoice::Named(at) => self.definitions.get(at).map(|tool| tool.name.clone()),
            _ => None,
        };
        CallRule {
            required: only.is_some() || self.choice == ToolChoice::Required,
            only,
            most: if self.parallel { MOST_CALLS } else { 1 },
        }
    }

    fn compile(
        &self,
        text: &TextModel,
        thinking: Option<ThinkingStart>,
    ) -> Result<Arc<dyn TokenGrammar>, RequestError> {
        let compiled = compile(text, &self.definitions, &self.rule(), thinking);
        compiled.map_err(|why| self.refusal(text, why))
    }

    /// Names the first tool that is refused by itself.
    fn refusal(&self, text: &TextModel, why: FormatRefused) -> RequestError {
        let rule = CallRule { only: None, ..self.rule() };
        for (at, tool) in self.definitions.iter().enumerate() {
            if let Err(why) = compile(text, std::slice::from_ref(tool), &rule, None) {
                let field = format!("tools[{at}].function.parameters");
                return RequestError::refused(&field, why.0);
            }
        }
        RequestError::refused("tools", why.0)
    }
}

fn compile(
    text: &TextModel,
    tools: &[ToolDefinition],
    rule: &CallRule,
    thinking: Option<ThinkingStart>,
) -> Result<Arc<dyn TokenGrammar>, FormatRefused> {
    let unusable = || FormatRefused("is not available for this model".into());
    let format = text.call_grammar(tools, rule, thinking).ok_or_else(unusable)??;
    text.compile(&format).map(|grammar| Arc::new(AnswerGrammar(grammar)) as Arc<dyn TokenGrammar>)
}

/// A prompt, and how its answer is made and read.
pub struct PreparedAnswer {
    pub prompt: Arc<Vec<u32>>,
    /// SHA-256 of the prompt's tokens, as receipts hold it.
    pub digest: Sha256Bytes,
    pub grammar: Option<Arc<dyn TokenGrammar>>,
    pub reader: AnswerReader,
}

impl GenerationInput {
    /// Refuses tools and thinking that this model or this plan does not have.
    pub(super) fn check_capabilities(
        &self,
        model: &ServedModel,
        plan: &Plan,
    ) -> Result<(), RequestError> {
        if let Some(asked) = &self.format {
            Capability::Formats.check(asked.field, model, plan)?;
        }
        if let Some(asked) = &self.tools {
            let demanded = asked.as_ref().is_ok_and(|asked| asked.choice != ToolChoice::Auto);
            let forced = demanded && Capability::ForcedTools.lack(model).is_none();
            let needed = if forced { Capability::ForcedTools } else { Capability::Tools };
            needed.check("tools", model, plan)?;
            asked.as_ref().map_err(Clone::clone)?;
        }
        // A call begins with a header there, which cannot stand inside a message.
        if self.continues && self.offered().is_some() && model.text.has_channels() {
            let why = "cannot be offered where this model goes on with a message: send one of them";
            return Err(RequestError::refused("tools", why));
        }
        let thought = self.messages.iter().position(|m| m.reasoning_content.is_some());
        if let Some(at) = thought {
            let field = format!("messages[{at}].reasoning_content");
            Capability::Reasoning.check(&field, model, plan)?;
        }
        self.variables(&model.text).map(drop)
    }

    /// The template's variables that the request sets.
    fn variables(&self, text: &TextModel) -> Result<serde_json::Map<String, Value>, RequestError> {
        let mut variables = self.named_variables(text)?;
        let Some(effort) = self.effort.filter(|effort| !has_effort(text, *effort)) else {
            return Ok(variables);
        };
        let told = effort.variables(|name| text.template.reads(name));
        if told.is_none() && !self.is_lenient {
            let why = "cannot be chosen: this model's template has no switch for thinking";
            return Err(RequestError::refused("reasoning_effort", why));
        }
        for (name, value) in told.unwrap_or_default() {
            if variables.get(&name).is_some_and(|set| *set != value) {
                let why = format!("contradicts chat_template_kwargs.{name}: send one of them");
                return Err(RequestError::refused("reasoning_effort", why));
            }
            variables.insert(name, value);
        }
        Ok(variables)
    }

    /// The variables that the request names for the model's template.
    fn named_variables(
        &self,
        text: &TextModel,
    ) -> Result<serde_json::Map<String, Value>, RequestError> {
        let mut variables = self.template_variables.clone();
        if self.is_lenient {
            variables.retain(|name, _| text.template.reads(name));
        }
        match variables.keys().find(|name| !text.template.reads(name)) {
            None => Ok(variables),
            Some(name) => {
                let field = format!("chat_template_kwargs.{name}");
                let why = "is nothing that this model's template reads: leave it out";
                Err(RequestError::refused(&field, why))
            }
        }
    }

    /// The paths of the fields that the model's template writes nowhere, and of rules that its form
    /// of calls does not keep to.
    pub fn without_effect(&self, text: &TextModel) -> Vec<String> {
        let mut paths = self.unread(text);
        let tools = self.offered().map(|asked| text.rules_left_out(&asked.definitions));
        let left_out = tools.into_iter().flatten();
        paths.extend(left_out.map(|(at, rule)| {
            let steps: String = rule.split('/').skip(1).map(shown_step).collect();
            format!("tools[{at}].function.parameters{steps}")
        }));
        paths
    }

    fn unread(&self, text: &TextModel) -> Vec<String> {
        let reads = |name: &str| text.template.reads(name);
        let unread = self.template_variables.keys().filter(|name| !reads(name));
        let mut paths: Vec<String> =
            unread.map(|name| format!("chat_template_kwargs.{name}")).collect();
        let silent = |effort: &ThinkingEffort| {
            has_effort(text, *effort) || effort.variables(reads).is_none()
        };
        paths.extend(self.effort.filter(silent).map(|_| "reasoning_effort".to_owned()));
        for (index, message) in self.messages.iter().enumerate() {
            let fields = [
                ("name", &message.name),
                ("tool_call_id", &message.tool_call_id),
                ("reasoning_content", &message.reasoning_content),
            ];
            let silent = fields.into_iter().filter(|(field, value)| {
                value.is_some() && text.template.leaves_out(&message.role, field)
            });
            paths.extend(silent.map(|(field, _)| format!("messages[{index}].{field}")));
        }
        paths
    }

    /// The tools that the model is told of.
    fn offered(&self) -> Option<&AskedTools> {
        let asked = self.tools.as_ref()?.as_ref().ok()?;
        (asked.choice != ToolChoice::None).then_some(asked)
    }

    /// The tokens of the raw prompt, or of the messages and tools as the model's template writes
    /// them. Blocking: long conversations take milliseconds to tokenise.
    pub fn prompt(&self, text: &TextModel, unwanted: &Unwanted) -> Result<Vec<u32>, RequestError> {
        let encoded = match &self.raw {
            Some(raw) => text.encode_raw(raw),
            None => text.encode_chat_until(&self.messages, &self.extras(text)?, unwanted),
        };
        encoded.map_err(not_encoded)
    }

    /// The text of that prompt. Blocking, too.
    pub fn prompt_text(
        &self,
        text: &TextModel,
        unwanted: &Unwanted,
    ) -> Result<String, RequestError> {
        let shown = match &self.raw {
            Some(raw) => text.encode_raw(raw).and_then(|ids| text.tokenizer.decode(&ids, false)),
            None => text.render_chat(&self.messages, &self.extras(text)?, unwanted),
        };
        shown.map_err(not_encoded)
    }

    fn extras(&self, text: &TextModel) -> Result<PromptExtras, RequestError> {
        Ok(PromptExtras {
            tools: self.offered().map(|asked| asked.shown.clone()),
            variables: self.variables(text)?,
            continues: self.continues,
        })
    }

    /// Makes the prompt, the grammar and the reader of the answer. Blocking: formats take tenths of
    /// a second to compile. `thinks`: what the model thinks is told apart.
    pub fn prepare(
        &self,
        text: &TextModel,
        thinks: bool,
        unwanted: &Unwanted,
    ) -> Result<PreparedAnswer, RequestError> {
        let (tools, prompt) = (self.offered(), self.prompt(text, unwanted)?);
        let is_raw = self.raw.is_some();
        if is_raw && prompt.is_empty() {
            return Err(RequestError::refused("prompt", "has no tokens: send a text"));
        }
        let thinking = text.thinking_start(&prompt).filter(|_| thinks && !is_raw);
        let grammar = match (&self.format, tools) {
            (_, Some(asked)) => Some(asked.compile(text, thinking)?),
            (Some(asked), None) => Some(asked.compile(text, thinking, is_raw)?),
            (None, None) => None,
        };
        let definitions = tools.map(|asked| asked.definitions.as_slice());
        // The answer to a raw prompt is text, all of it.
        let of_chat = || text.reader(thinking, definitions);
        let mut reader = if is_raw { AnswerReader::default() } else { of_chat() };
        reader.continues = self.continues || is_raw;
        let digest = TokenDigest::of(&prompt);
        Ok(PreparedAnswer { prompt: Arc::new(prompt), digest, grammar, reader })
    }
}

/// A step of a path. Names come from the client, so only plain ones are repeated.
fn shown_step(step: &str) -> String {
    let is_plain = step.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-$".contains(&b));
    if is_plain { format!(".{step}") } else { ".*".into() }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn not_encoded(error: cresset_text::Error) -> RequestError {
    if let cresset_text::Error::TemplateRefused(_) = error {
        return RequestError::TemplateRefused(error.to_string());
    }
    tracing::error!(%error, "a prompt could not be encoded");
    RequestError::GenerationFailed
}

/// Whether the model answers with this effort without being told: one that never thinks is always
/// off, and one that cannot be switched always thinks, in the one degree that it has.
fn has_effort(text: &TextModel, effort: ThinkingEffort) -> bool {
    if effort == ThinkingEffort::Off {
        return text.thinking.is_none();
    }
    let has_switch = effort.variables(|name| text.template.reads(name)).is_some();
    text.thinking.is_some() && !has_switch
}

/// A compiled format, as the engine keeps a sequence to it.
#[derive(Debug)]
struct AnswerGrammar(Arc<CompiledGrammar>);

#[derive(Debug)]
struct AnswerMask(GrammarPlace);

impl TokenGrammar for AnswerGrammar {
    fn begin(&self) -> Arc<dyn TokenMask> {
        Arc::new(AnswerMask(self.0.start()))
    }
}

impl TokenMask for AnswerMask {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        self.0.allowed_after(output)
    }
}
