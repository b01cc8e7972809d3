//! Formats that an answer keeps to, compiled into grammars over the release's own tokens by the
//! crate llguidance. A format is honoured as it was given or refused before anything runs; it is
//! never loosened.

use crate::{TextModel, Tokenizer};
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};

/// What an answer keeps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// A JSON value that this schema allows; its members in the order in which the answer has them.
    Schema(String),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in the Lark syntax that llguidance documents.
    Lark(String),
    /// A text of this grammar, in which `@part_0`, `@part_1` and so on stand for formats.
    Nested { grammar: String, parts: Vec<AnswerFormat> },
}

/// Why a format is not honoured, in words that a client may see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatRefused(pub String);

/// White space between the parts of JSON. Where nothing bounds it, small models write it without
/// end.
const WHITE_SPACE: &str = r"[ \n\r\t]{1,32}";
/// The unit of numbers that have a minimum or a maximum, which are never written with an exponent.
/// Small models write decimals without end, too. The library counts a digit times ten to the number
/// of decimals in 32 bits, so that eight are the most.
const UNIT: f64 = 1e-8;
/// Grammars that are kept compiled, and bytes of their formats together.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 4 << 20;
/// States of a grammar's lexer, 1 to 2 KiB each.
const LEXER_STATES: usize = 16_384;
/// Work of one answer's lexer: for all its masks together, and for each of its tokens. The library
/// does 14 000 units a millisecond, and a token of an ordinary schema takes a hundredth of that.
const ANSWER_WORK: u64 = 1_400_000;
const TOKEN_WORK: u64 = 28_000;

/// The formats of one release. It is made at the first request that asks for one, because it takes
/// tenths of a second and tens of megabytes.
pub struct Grammars {
    factory: ParserFactory,
    /// Held while a format is compiled, so that formats never take more than one thread.
    compiling: Mutex<()>,
    /// The latest used last.
    kept: Mutex<VecDeque<(AnswerFormat, Arc<CompiledGrammar>)>>,
}

/// A format that is ready for any number of answers.
pub struct CompiledGrammar {
    matcher: Matcher,
    first: Arc<[u32]>,
}

/// One answer's place in its grammar.
pub struct GrammarPlace(Mutex<GrammarCursor>);

struct GrammarCursor {
    matcher: Matcher,
    /// How many of the answer's tokens the matcher has taken.
    taken: usize,
    allowed: Arc<[u32]>,
    work: u64,
}

impl TextModel {
    /// The grammar of a format. Blocking: a format that is not kept takes up to tenths of a second,
    /// and waits for others that are being compiled.
    pub fn compile(&self, format: &AnswerFormat) -> Result<Arc<CompiledGrammar>, FormatRefused> {
        let grammars = self.grammars.get_or_init(|| {
            Grammars::new(self).map_err(|why| {
                tracing::error!(%why, "no format can be honoured for this tokenizer");
            })
        });
        let unusable = || FormatRefused("is not available for this model".into());
        grammars.as_ref().map_err(|()| unusable())?.compile(format)
    }
}

impl Grammars {
    fn new(text: &TextModel) -> Result<Self, String> {
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie(text)));
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|why| why.to_string())?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: LEXER_STATES,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, compiling: Mutex::default(), kept: Mutex::default() })
    }

    fn compile(&self, format: &AnswerFormat) -> Result<Arc<CompiledGrammar>, FormatRefused> {
        if let Some(grammar) = self.find(format) {
            return Ok(grammar);
        }
        let _alone = self.compiling.lock();
        if let Some(grammar) = self.find(format) {
            return Ok(grammar);
        }
        let grammar = Arc::new(self.compile_anew(format)?);
        self.keep(format.clone(), grammar.clone());
        Ok(grammar)
    }

    fn find(&self, format: &AnswerFormat) -> Option<Arc<CompiledGrammar>> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|(known, _)| known == format)?;
        let entry = kept.remove(at)?;
        let grammar = entry.1.clone();
        kept.push_back(entry);
        Some(grammar)
    }

    fn keep(&self, format: AnswerFormat, grammar: Arc<CompiledGrammar>) {
        let mut kept = self.kept.lock();
        kept.push_back((format, grammar));
        let bytes = |kept: &VecDeque<_>| -> usize {
            kept.iter().map(|(format, _): &(AnswerFormat, _)| format.bytes()).sum()
        };
        while kept.len() > KEPT || bytes(&kept) > KEPT_BYTES {
            kept.pop_front();
        }
    }

    /// Compiles a format and computes what may come first: some grammars only fail there.
    fn compile_anew(&self, format: &AnswerFormat) -> Result<CompiledGrammar, FormatRefused> {
        match self.compile_grammar(format, Decimals::Bounded) {
            // Bounds of a number may be closer to each other than the unit is long.
            Err(_) if format.names_numbers() => self.compile_grammar(format, Decimals::Any),
            compiled => compiled,
        }
    }

    fn compile_grammar(
        &self,
        format: &AnswerFormat,
        decimals: Decimals,
    ) -> Result<CompiledGrammar, FormatRefused> {
        let parser = self.factory.create_parser(format.grammar(decimals)?);
        let mut matcher = Matcher::new(parser);
        let first =
            matcher.compute_mask_or_eos().map_err(|why| format.refusal(&why.to_string()))?;
        Ok(CompiledGrammar { matcher, first: first.as_slice().into() })
    }
}

/// The tokens' bytes as the library wants them. What no answer may contain as text is marked as
/// special.
fn trie(text: &TextModel) -> TokTrie {
    let vocabulary = text.tokenizer.vocab_size() as u32;
    let words: Vec<Vec<u8>> = (0..vocabulary).map(|id| word(&text.tokenizer, id)).collect();
    let info = TokRxInfo::new(vocabulary, text.eos_ids[0]);
    TokTrie::from(&info, &words).with_eos_tokens(&text.eos_ids)
}

/// Added tokens mark the parts of a conversation, whether or not their file calls them special.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id, false);
    let marks = tokenizer.is_added(id) && !bytes.trim_ascii().is_empty();
    if marks { [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat() } else { bytes }
}

impl AnswerFormat {
    fn bytes(&self) -> usize {
        match self {
            Self::Schema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::Nested { grammar, parts } => {
                grammar.len() + parts.iter().map(Self::bytes).sum::<usize>()
            }
        }
    }

    fn grammar(&self, decimals: Decimals) -> Result<TopLevelGrammar, FormatRefused> {
        Ok(match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(bounded(schema, decimals)?),
            Self::Regex(expression) => TopLevelGrammar::from_regex(expression),
            Self::Choice(texts) => TopLevelGrammar::from_lark(one_of(texts)),
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Self::Nested { grammar, parts } => nested(grammar, parts, decimals)?,
        })
    }

    /// Whether there may be numbers whose decimals were bounded.
    fn names_numbers(&self) -> bool {
        match self {
            Self::Schema(schema) => schema.contains("number"),
            Self::Nested { parts, .. } => parts.iter().any(Self::names_numbers),
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => false,
        }
    }

    /// The library's reason, where its words are about the format; others name its own parts.
    fn refusal(&self, why: &str) -> FormatRefused {
        let line = why.lines().next().unwrap_or_default().trim();
        let known = ["Unimplemented", "Unknown", "Unsatisfiable", "min/maxProperties", "circular"];
        let shown = match self {
            Self::Schema(_) if line.starts_with("oneOf") => {
                return FormatRefused(ONE_OF.into());
            }
            Self::Schema(_) if line.starts_with("regex") => {
                return FormatRefused("has a pattern that is no expression known here".into());
            }
            Self::Schema(_) => known.iter().any(|start| line.starts_with(start)),
            Self::Regex(_) | Self::Lark(_) => !line.is_empty() && !line.contains("panic"),
            Self::Choice(_) | Self::Nested { .. } => false,
        };
        let text = if shown { line } else { "it is too complex, or uses what is not supported" };
        FormatRefused(format!("cannot be kept to: {}", text.trim_end_matches('.')))
    }
}

fn nested(
    grammar: &str,
    parts: &[AnswerFormat],
    decimals: Decimals,
) -> Result<TopLevelGrammar, FormatRefused> {
    let mut whole = TopLevelGrammar::from_lark(grammar.to_owned());
    for (at, part) in parts.iter().enumerate() {
        let named =
            |part: GrammarWithLexer| GrammarWithLexer { name: Some(format!("part_{at}")), ..part };
        whole.grammars.extend(part.grammar(decimals)?.grammars.into_iter().map(named));
    }
    Ok(whole)
}

/// How many decimals a number with a minimum or a maximum may have.
#[derive(Clone, Copy, PartialEq)]
enum Decimals {
    Any,
    /// Those of `UNIT`.
    Bounded,
}

/// The schema, with white space bounded. A schema that is `true` or `false` has no place for that.
fn bounded(schema: &str, decimals: Decimals) -> Result<Value, FormatRefused> {
    let schema = serde_json::from_str(schema);
    let mut schema: Value = schema.map_err(|_| FormatRefused("must be a JSON schema".into()))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    // Units of the schema's own would have to be brought together with ours. They are looked for in
    // the schema as it was read, because a client may spell a keyword with escapes.
    let has_units = || schema.to_string().contains("multipleOf");
    let bounds_decimals = decimals == Decimals::Bounded && !has_units();
    change_schemas(&mut schema, &|members| {
        name_no_draft(members);
        if bounds_decimals {
            bound_decimals(members);
        }
    });
    if let Some(members) = schema.as_object_mut() {
        members.insert("x-guidance".into(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    Ok(schema)
}

/// Changes each schema in a schema. Values that are no schemas are left as they are.
fn change_schemas(schema: &mut Value, change: &dyn Fn(&mut Map<String, Value>)) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| change_schemas(item, change)),
        Value::Object(members) => {
            change(members);
            for (keyword, value) in members {
                match (keyword.as_str(), value) {
                    ("const" | "enum", _) => {}
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions",
                        Value::Object(named),
                    ) => named.values_mut().for_each(|value| change_schemas(value, change)),
                    (_, value) => change_schemas(value, change),
                }
            }
        }
        _ => {}
    }
}

/// Removes the name of a draft: the compiler ignores rules that are younger than the draft named,
/// and reads older spellings in any.
fn name_no_draft(members: &mut Map<String, Value>) {
    members.retain(|name, value| name != "$schema" || !value.is_string());
}

fn bound_decimals(members: &mut Map<String, Value>) {
    let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
    let is_number = match members.get("type") {
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "number"),
        kind => kind.is_some_and(|kind| kind == "number"),
    };
    if is_number && bounds.iter().any(|bound| members.contains_key(*bound)) {
        members.insert("multipleOf".into(), json!(UNIT));
    }
}

/// A grammar of these texts alone.
fn one_of(texts: &[String]) -> String {
    let mut grammar = "start: ".to_owned();
    for (index, text) in texts.iter().enumerate() {
        let separator = if index > 0 { " | " } else { "" };
        let _ = write!(grammar, "{separator}{}", Value::from(text.as_str()));
    }
    grammar
}

impl CompiledGrammar {
    /// The start of an answer of its own, which shares nothing that grows with others.
    pub fn start(&self) -> GrammarPlace {
        let (matcher, allowed) = (self.matcher.deep_clone(), self.first.clone());
        GrammarPlace(Mutex::new(GrammarCursor { matcher, taken: 0, allowed, work: 0 }))
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for GrammarPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarPlace").finish_non_exhaustive()
    }
}

impl GrammarPlace {
    /// The tokens that may follow the answer's tokens so far, which only grow from call to call, as
    /// bits: id `i` is bit `i % 32` of word `i / 32`. An error says why the answer cannot go on:
    /// the grammar has grown beyond its bounds, or its masks cost too much.
    pub fn allowed_after(&self, answer: &[u32]) -> Result<Arc<[u32]>, String> {
        let mut cursor = self.0.lock();
        let new = answer.get(cursor.taken..).ok_or("an answer became shorter")?;
        if !new.is_empty() {
            cursor.advance(new).map_err(|why| {
                let why: String = why.chars().take(MOST_OF_A_REASON).collect();
                format!("the grammar of an answer failed: {why}")
            })?;
        }
        Ok(cursor.allowed.clone())
    }
}

impl GrammarCursor {
    fn advance(&mut self, new: &[u32]) -> Result<(), String> {
        let told = |why: &dyn std::fmt::Display| why.to_string();
        self.matcher.consume_tokens(new).map_err(|why| told(&why))?;
        let mask: SimpleVob = self.matcher.compute_mask_or_eos().map_err(|why| told(&why))?;
        self.taken += new.len();
        self.allowed = mask.as_slice().into();
        self.work += self.matcher.last_step_stats().map_err(|why| told(&why))?.lexer_cost;
        if self.work > ANSWER_WORK + TOKEN_WORK * self.taken as u64 {
            return Err("its masks cost more than they may".into());
        }
        Ok(())
    }
}

/// Characters that are told of the library's reason.
const MOST_OF_A_REASON: usize = 200;

const ONE_OF: &str = "has a oneOf whose schemas may hold at once, which cannot be kept to: \
    use anyOf";

/// Where a release's formats are kept, once they are made.
pub(crate) type GrammarsOnce = OnceLock<Result<Grammars, ()>>;

#[cfg(test)]
pub(crate) mod tests;
