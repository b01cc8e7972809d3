//! What an answer that keeps to a format asks of the engine: which tokens may follow. Pure.

use std::fmt::Debug;
use std::sync::Arc;

/// The tokens that may follow, as bits: token `i` is bit `i % 32` of word `i / 32`.
pub type AllowedTokens = Arc<[u32]>;

/// The grammar of an answer, ready for any number of sequences.
pub trait TokenGrammar: Debug + Send + Sync {
    /// A matcher of its own for one sequence, and the tokens that may come first.
    fn begin(&self) -> (Box<dyn GrammarMatcher>, AllowedTokens);
}

/// Follows the answer of one sequence. What it allows depends on the tokens before alone, so that
/// an answer is the same in any company.
pub trait GrammarMatcher: Send {
    /// Takes the next token of the answer and returns those that may follow it. An error says why
    /// the grammar cannot be followed any further; the matcher is of no use after it.
    fn advance(&mut self, token: u32) -> Result<AllowedTokens, String>;
}

/// A sequence's place in its grammar.
pub(super) struct GrammarPlace {
    matcher: Box<dyn GrammarMatcher>,
    pub(super) allowed: AllowedTokens,
}

impl GrammarPlace {
    pub(super) fn begin(grammar: &dyn TokenGrammar) -> Self {
        let (matcher, allowed) = grammar.begin();
        Self { matcher, allowed }
    }

    pub(super) fn advance(&mut self, token: u32) -> Result<(), String> {
        self.allowed = self.matcher.advance(token)?;
        Ok(())
    }
}

impl Debug for GrammarPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarPlace").finish_non_exhaustive()
    }
}
