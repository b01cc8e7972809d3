//! Finds rules of a compiled grammar that no finite text keeps to.

use llguidance::api::ParserLimits;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::{CGrammar, CSymIdx, Grammar};
use llguidance::panic_utils::catch_unwind;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

/// The name of a rule that an answer could begin and never end.
pub(super) fn endless_rule(
    grammar: &Grammar,
    lexer: &LexerSpec,
    limits: &ParserLimits,
) -> Option<String> {
    // A grammar that is too large is told when it is compiled for its answers.
    let compiled = catch_unwind(AssertUnwindSafe(|| grammar.compile(lexer.clone(), limits)));
    let compiled = compiled.ok()?;
    let all = reachable(&compiled);
    let finite = finite(&compiled, &all);
    let endless = all.into_iter().find(|symbol| !finite.contains(symbol))?;
    // The library marks a name that was used before its rule was read.
    Some(compiled.sym_name(endless).trim_end_matches('_').to_owned())
}

/// The symbols that some finite text keeps to.
fn finite(grammar: &CGrammar, all: &[CSymIdx]) -> HashSet<CSymIdx> {
    let mut finite = HashSet::new();
    loop {
        let before = finite.len();
        for symbol in all {
            let data = grammar.sym_data(*symbol);
            let ends = |rule| grammar.rule_rhs(rule).0.iter().all(|part| finite.contains(part));
            let is_empty = data.is_nullable || !data.cond_nullable.is_empty();
            if is_empty || data.is_terminal || data.rules.iter().copied().any(ends) {
                finite.insert(*symbol);
            }
        }
        if finite.len() == before {
            return finite;
        }
    }
}

/// The symbols of a grammar, those that lead to others behind them: what is made of others is known
/// sooner then.
fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let (mut seen, mut open) = (HashSet::from([grammar.start()]), vec![grammar.start()]);
    let mut all = Vec::new();
    while let Some(symbol) = open.pop() {
        all.push(symbol);
        for rule in grammar.rules_of(symbol) {
            let (parts, ..) = grammar.rule_rhs(*rule);
            open.extend(parts.iter().filter(|part| seen.insert(**part)));
        }
    }
    all.reverse();
    all
}
