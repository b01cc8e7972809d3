//! Grammars in GBNF, the language of llama.cpp (`root ::= …`), written in Lark. GBNF is about
//! characters, and Lark's terminals are as long as they can be: a terminal is made of more than one
//! character only where that allows the same texts.

mod follow;
mod read;
mod write;

pub(super) use write::to_lark;

/// Whether a grammar is written in GBNF: Lark has no `::=`.
pub(super) fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let name = line.trim_start().trim_start_matches(read::is_of_rule_name);
        name.len() < line.trim_start().len() && name.trim_start().starts_with("::=")
    })
}

/// A part of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum GbnfNode {
    Text(String),
    /// One character, as an expression.
    Class(String),
    Rule(usize),
    Sequence(Vec<Self>),
    Choice(Vec<Self>),
    Repeat(Box<Self>, u32, Option<u32>),
    /// A terminal of Lark.
    Terminal(usize),
}

impl GbnfNode {
    fn inner(&self) -> &[Self] {
        match self {
            Self::Sequence(all) | Self::Choice(all) => all,
            Self::Repeat(one, ..) => std::slice::from_ref(one),
            _ => &[],
        }
    }

    /// Calls `found` with each rule that it names.
    fn for_each_rule(&self, found: &mut dyn FnMut(usize)) {
        if let Self::Rule(rule) = self {
            found(*rule);
        }
        self.inner().iter().for_each(|node| node.for_each_rule(found));
    }
}
