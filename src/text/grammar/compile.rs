//! Constrained decoding: formats of answers, compiled into grammars over the release's own tokens
//! by the crate llguidance. A format is honoured as it was given or refused before anything runs.

use super::answer_format::{AnswerFormat, FormatRefused};
use super::endless::endless_rule;
use super::schema::{Bounds, Terminals, Writing};
use super::trial;
use crate::settings::FormatSettings;
use crate::tokenizer::Tokenizer;
use llguidance::api::{GrammarInit, ParserLimits};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Logger, Matcher, ParserFactory};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::error::Error;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// Grammars that are kept compiled, and bytes of their formats together.
const MAX_KEPT: usize = 64;
const MAX_KEPT_BYTES: usize = 4 << 20;
/// Bytes of stack for a grammar of which each rule leads to the next, at its longest.
const DEEP_STACK: usize = 256 << 20;
/// States of a grammar's lexer, 1 to 2 KiB each.
const LEXER_STATES: usize = 16_384;
/// Work of compiling a format's terminals. The library does 50 000 units a millisecond.
const COMPILING_WORK: u64 = 600_000;
/// Items of a row of a grammar whose rules a client wrote. Rules that are read in many ways cost
/// the square of it for each byte.
const ITEMS_OF_RULES: usize = 500;
/// Parts of a refused format that are tried by themselves, to find the one that is at fault.
const MOST_TRIES: usize = 40;
/// Work of one answer's masks: for all of them together, and for each of its tokens. The library
/// does 14 000 units of a lexer's work a millisecond, and 20 000 items of a grammar's rows. A token
/// of an ordinary schema takes a hundredth of that.
const ANSWER_WORK: u64 = 1_400_000;
const TOKEN_WORK: u64 = 28_000;

/// The formats of one release. It is made at the first request with one, because it takes tenths
/// of a second and tens of megabytes.
pub(crate) struct Grammars {
    factory: ParserFactory,
    settings: FormatSettings,
    /// Held while a format is compiled, so that formats never take more than one thread.
    compiling: Mutex<()>,
    /// The latest used last. Refusals are kept as well, because they may cost as much.
    kept: Mutex<VecDeque<(AnswerFormat, Compiled)>>,
}

type Compiled = Result<Arc<CompiledGrammar>, FormatRefused>;

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

impl Grammars {
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        eos_ids: &[u32],
        settings: FormatSettings,
    ) -> Result<Self, String> {
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie(tokenizer, eos_ids)));
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|why| why.to_string())?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: LEXER_STATES,
            initial_lexer_fuel: COMPILING_WORK,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, settings, compiling: Mutex::default(), kept: Mutex::default() })
    }

    /// The grammar of a format. Blocking: a format that is not kept takes up to tenths of a second,
    /// and waits for others that are being compiled.
    pub(crate) fn compile(&self, format: &AnswerFormat) -> Compiled {
        if let Some(compiled) = self.find(format) {
            return compiled;
        }
        let _alone = self.compiling.lock();
        if let Some(compiled) = self.find(format) {
            return compiled;
        }
        let Some(compiled) = self.compile_anew(format) else {
            return Err(FormatRefused("cannot be compiled now".into()));
        };
        let compiled = compiled.map(Arc::new);
        self.keep(format.key(), compiled.clone());
        compiled
    }

    fn find(&self, format: &AnswerFormat) -> Option<Compiled> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|(known, _)| known == format)?;
        let entry = kept.remove(at)?;
        let compiled = entry.1.clone();
        kept.push_back(entry);
        Some(compiled)
    }

    fn keep(&self, format: AnswerFormat, compiled: Compiled) {
        let mut kept = self.kept.lock();
        kept.push_back((format, compiled));
        let bytes = |kept: &VecDeque<_>| -> usize {
            kept.iter().map(|(format, _): &(AnswerFormat, _)| format.bytes()).sum()
        };
        while kept.len() > MAX_KEPT || bytes(&kept) > MAX_KEPT_BYTES {
            kept.pop_front();
        }
    }

    /// The library follows a client's rules one inside the other, as deep as they lead. `None`:
    /// there is no thread for that.
    fn compile_anew(
        &self,
        format: &AnswerFormat,
    ) -> Option<Result<CompiledGrammar, FormatRefused>> {
        if !format.has_rules() {
            return Some(self.compile_here(format));
        }
        std::thread::scope(|scope| {
            let deep = std::thread::Builder::new().name("grammar".into()).stack_size(DEEP_STACK);
            let compiling = deep.spawn_scoped(scope, || self.compile_here(format));
            compiling.ok().and_then(|thread| thread.join().ok())
        })
    }

    /// Compiles a format, computes what may come first and tries what follows: some grammars only
    /// fail there.
    fn compile_here(&self, format: &AnswerFormat) -> Result<CompiledGrammar, FormatRefused> {
        let compiled = match self.compile_grammar(format, Bounds::Added) {
            // Bounds of a number may be closer to each other than the unit is long, and the library
            // counts no members beside optional ones.
            Err(_) if format.may_be_bounded() => self.compile_grammar(format, Bounds::AsWritten),
            compiled => compiled,
        };
        let grammar = compiled.map_err(|why| self.innermost(format, why))?;
        let ends = self.factory.tok_env().tok_trie().eos_tokens();
        trial::try_out(&grammar, ends).map(|()| grammar)
    }

    /// The refusal of the innermost part of a format that is refused by itself. Parts of what costs
    /// too much are not compiled again.
    fn innermost(&self, format: &AnswerFormat, why: FormatRefused) -> FormatRefused {
        if why == FormatRefused::costly() {
            return why;
        }
        let (mut parts, mut why, mut left) = (format.parts(), why, MOST_TRIES);
        while let Some((place, part)) = parts.pop().filter(|_| left > 0) {
            left -= 1;
            // What a part refers to may be missing in it, which is no fault of the whole.
            let is_whole = part.grammar(self.writing(Bounds::AsWritten), &mut Terminals::default());
            if is_whole.is_err() && !matches!(format, AnswerFormat::Nested { .. }) {
                continue;
            }
            if let Err(FormatRefused(inner)) = self.compile_grammar(&part, Bounds::AsWritten) {
                why = FormatRefused(if place.is_empty() {
                    inner
                } else {
                    format!("{inner} (at #{place})")
                });
                let inside = part.parts().into_iter();
                parts = inside.map(|(at, part)| (format!("{place}{at}"), part)).collect();
            }
        }
        why
    }

    fn writing(&self, bounds: Bounds) -> Writing {
        let FormatSettings { open_objects, max_members } = self.settings;
        Writing { bounds, open_objects, max_members }
    }

    fn limits(&self, format: &AnswerFormat) -> ParserLimits {
        let mut limits = self.factory.limits().clone();
        if format.has_rules() {
            limits.max_items_in_row = ITEMS_OF_RULES;
        }
        limits
    }

    fn compile_grammar(
        &self,
        format: &AnswerFormat,
        bounds: Bounds,
    ) -> Result<CompiledGrammar, FormatRefused> {
        let mut terminals = Terminals::default();
        let grammar = format.grammar(self.writing(bounds), &mut terminals)?;
        let refusal = |why: &str| format.refusal(why);
        let limits = self.limits(format);
        let internal = catch_unwind(AssertUnwindSafe(|| {
            let env = Some(self.factory.tok_env().clone());
            GrammarInit::Serialized(grammar).to_internal(env, limits.clone())
        }));
        let (grammar, mut lexer) = internal.map_err(|why| refusal(&why.to_string()))?;
        terminals.put_into(&mut lexer).map_err(|why| refusal(&why))?;
        let endless = format.has_rules().then(|| endless_rule(&grammar, &lexer, &limits));
        if let Some(rule) = endless.flatten() {
            return Err(format.endless(&rule));
        }
        let grammar = GrammarInit::Internal(grammar, lexer);
        let (logger, abilities) = (Logger::new(0, 0), InferenceCapabilities::default());
        let parser = self.factory.create_parser_from_init_ext(grammar, logger, abilities, limits);
        let mut matcher = Matcher::new(parser);
        let first = matcher.compute_mask_or_eos().map_err(|why| refusal(&why.to_string()))?;
        Ok(CompiledGrammar { matcher, first: first.as_slice().into() })
    }
}

/// The tokens' bytes as the library wants them. What no answer may contain as text is marked as
/// special.
fn trie(tokenizer: &Tokenizer, eos_ids: &[u32]) -> TokTrie {
    let vocabulary = tokenizer.vocab_size() as u32;
    let words: Vec<Vec<u8>> = (0..vocabulary).map(|id| word(tokenizer, id)).collect();
    let info = TokRxInfo::new(vocabulary, eos_ids[0]);
    TokTrie::from(&info, &words).with_eos_tokens(eos_ids)
}

/// Added tokens mark the parts of a conversation, whether or not their file calls them special.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id, false);
    let marks = tokenizer.is_added(id) && !bytes.trim_ascii().is_empty();
    if marks { [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat() } else { bytes }
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
    /// bits: id `i` is bit `i % 32` of word `i / 32`. An error says why no token may follow:
    /// the grammar has grown beyond its bounds, or its masks cost too much.
    pub fn allowed_after(&self, answer: &[u32]) -> Result<Arc<[u32]>, String> {
        let mut cursor = self.0.lock();
        let new = answer.get(cursor.taken..).ok_or("an answer became shorter")?;
        if !new.is_empty() {
            cursor.advance(new).map_err(|why| {
                let why: String = why.to_string().chars().take(MOST_OF_A_REASON).collect();
                format!("the grammar of an answer failed: {why}")
            })?;
        }
        Ok(cursor.allowed.clone())
    }

    /// Units of work that its masks took so far.
    pub(super) fn work(&self) -> u64 {
        self.0.lock().work
    }
}

impl GrammarCursor {
    fn advance(&mut self, new: &[u32]) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.matcher.consume_tokens(new)?;
        let mask: SimpleVob = self.matcher.compute_mask_or_eos()?;
        self.taken += new.len();
        self.allowed = mask.as_slice().into();
        let spent = self.matcher.last_step_stats()?;
        self.work += spent.lexer_cost + spent.all_items as u64;
        if self.work > ANSWER_WORK + TOKEN_WORK * self.taken as u64 {
            return Err("its masks cost more than they may".into());
        }
        Ok(())
    }
}

/// Characters that are shown of the library's reason.
const MOST_OF_A_REASON: usize = 200;

#[cfg(test)]
mod costs;
#[cfg(test)]
mod generated;
#[cfg(test)]
mod languages;
#[cfg(test)]
pub(crate) mod tests;
