//! Finds terminals that would swallow what may follow another one: a lexer makes each as long as it
//! can be, and does not go back.

use super::GbnfNode;
use llguidance::derivre::raw::RelevanceCache;
use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Work of one comparison, and of all for one grammar, in the library's units. Those that would
/// take more count as found.
const WORK: u64 = 20_000;
pub(super) const MOST_WORK: u64 = 2_000_000;

type TerminalSet = BTreeSet<usize>;

/// The terminals of which one may go on where another one ends and a third follows.
pub(super) fn overlapping(
    rules: &BTreeMap<usize, GbnfNode>,
    terminals: &[GbnfNode],
    named: &[GbnfNode],
    work: &mut u64,
) -> TerminalSet {
    let mut nodes = TerminalNodes::of(named);
    let begins: Vec<Begin> = terminals.iter().map(|node| nodes.begin(node)).collect();
    let is_empty: Vec<bool> = begins.iter().map(|begin| begin.is_empty).collect();
    let follow = Follow::of(rules, &is_empty);
    let Some(all) = terminals.iter().map(|node| nodes.built(node)).collect::<Option<Vec<_>>>()
    else {
        return (0..terminals.len()).collect();
    };
    let pairs = nodes.pairs(&all, &begins, &follow);
    let (mut exprs, mut cache) = (nodes.builder.into_exprset(), RelevanceCache::new());
    let most = *work;
    let mut is_found = |both: Option<ExprRef>| {
        let both = both.filter(|_| exprs.cost() < most);
        both.and_then(|both| cache.is_non_empty_limited(&mut exprs, both, WORK).ok())
            .unwrap_or(true)
    };
    let found = pairs.into_iter().filter(|(.., both)| is_found(*both));
    let found = found.flat_map(|(at, other, _)| [at, other]).collect();
    *work = work.saturating_sub(exprs.cost());
    found
}

/// What a terminal may begin with.
#[derive(Clone, Default)]
struct Begin {
    /// Texts and classes of one character.
    characters: HashSet<GbnfNode>,
    is_empty: bool,
}

/// What terminals are made of. Each rule is looked at once, however often it is named.
struct TerminalNodes<'g> {
    named: &'g [GbnfNode],
    builder: RegexBuilder,
    built: HashMap<usize, RegexAst>,
    begins: HashMap<usize, Begin>,
}

fn character(node: &GbnfNode) -> RegexAst {
    match node {
        GbnfNode::Text(text) => RegexAst::Literal(text.clone()),
        GbnfNode::Class(class) => RegexAst::Regex(class.clone()),
        _ => RegexAst::NoMatch,
    }
}

impl<'g> TerminalNodes<'g> {
    fn of(named: &'g [GbnfNode]) -> Self {
        let (builder, built) = (RegexBuilder::new(), HashMap::new());
        Self { named, builder, built, begins: HashMap::new() }
    }

    fn built(&mut self, node: &GbnfNode) -> Option<RegexAst> {
        let each = |nodes: &mut Self, all: &[GbnfNode]| {
            all.iter().map(|one| nodes.built(one)).collect::<Option<Vec<_>>>()
        };
        let ast = match node {
            GbnfNode::Rule(rule) => {
                if let Some(known) = self.built.get(rule) {
                    return Some(known.clone());
                }
                let ast = self.built(&self.named[*rule])?;
                self.built.insert(*rule, ast.clone());
                return Some(ast);
            }
            GbnfNode::Sequence(parts) => RegexAst::Concat(each(self, parts)?),
            GbnfNode::Choice(all) => RegexAst::Or(each(self, all)?),
            GbnfNode::Repeat(one, least, most) => {
                RegexAst::Repeat(Box::new(self.built(one)?), *least, most.unwrap_or(u32::MAX))
            }
            _ => character(node),
        };
        self.builder.mk(&ast).ok().map(RegexAst::ExprRef)
    }

    /// Texts of one terminal that go on as a third one does and are of another one, with the places
    /// of both; `None` for those that cannot be told.
    fn pairs(
        &mut self,
        all: &[RegexAst],
        begins: &[Begin],
        follow: &Follow<'_>,
    ) -> Vec<(usize, usize, Option<ExprRef>)> {
        let mut pairs = Vec::new();
        for (at, behind) in follow.terminals.iter().enumerate() {
            let next = behind.iter().flat_map(|next| &begins[*next].characters);
            let next: HashSet<&GbnfNode> = next.collect();
            let next = RegexAst::Or(next.into_iter().map(character).collect());
            let any = RegexAst::Regex("(?s:.*)".into());
            let longer = RegexAst::Concat(vec![all[at].clone(), next, any]);
            for (other, terminal) in all.iter().enumerate() {
                let both = RegexAst::And(vec![longer.clone(), terminal.clone()]);
                pairs.push((at, other, self.builder.mk(&both).ok()));
            }
        }
        pairs
    }

    fn begin(&mut self, node: &GbnfNode) -> Begin {
        match node {
            GbnfNode::Text(text) => {
                let first = text.chars().next().map(|letter| GbnfNode::Text(letter.into()));
                Begin { is_empty: first.is_none(), characters: first.into_iter().collect() }
            }
            GbnfNode::Class(_) => Begin { is_empty: false, characters: [node.clone()].into() },
            GbnfNode::Rule(rule) => self.begin_of_rule(*rule),
            GbnfNode::Repeat(one, least, _) => {
                let begin = self.begin(one);
                Begin { is_empty: begin.is_empty || *least == 0, ..begin }
            }
            _ => self.begin_of_all(node.inner(), matches!(node, GbnfNode::Choice(_))),
        }
    }

    fn begin_of_rule(&mut self, rule: usize) -> Begin {
        if let Some(known) = self.begins.get(&rule) {
            return known.clone();
        }
        let begin = self.begin(&self.named[rule]);
        self.begins.insert(rule, begin.clone());
        begin
    }

    /// What one of these begins with, or all of them one behind the other.
    fn begin_of_all(&mut self, all: &[GbnfNode], is_choice: bool) -> Begin {
        let mut begin = Begin { is_empty: !is_choice, ..Begin::default() };
        for node in all {
            let next = self.begin(node);
            begin.characters.extend(next.characters);
            if is_choice {
                begin.is_empty |= next.is_empty;
            } else if !next.is_empty {
                begin.is_empty = false;
                break;
            }
        }
        begin
    }
}

/// The terminals that may come first in a rule, and behind rules and terminals.
struct Follow<'g> {
    is_empty: &'g [bool],
    /// Of each rule, with whether it may be empty.
    first: BTreeMap<usize, (TerminalSet, bool)>,
    rules: BTreeMap<usize, TerminalSet>,
    terminals: Vec<TerminalSet>,
}

impl<'g> Follow<'g> {
    fn of(rules: &BTreeMap<usize, GbnfNode>, is_empty: &'g [bool]) -> Self {
        let terminals = vec![TerminalSet::new(); is_empty.len()];
        let mut found =
            Self { is_empty, first: BTreeMap::new(), rules: BTreeMap::new(), terminals };
        loop {
            let before = found.size();
            for (rule, shape) in rules {
                let first = found.first_of(shape);
                found.first.insert(*rule, first);
                let behind = found.rules.get(rule).cloned().unwrap_or_default();
                found.walk(shape, &behind);
            }
            if found.size() == before {
                return found;
            }
        }
    }

    fn size(&self) -> usize {
        let first = self.first.values().map(|(all, empty)| all.len() + usize::from(*empty));
        let behind = self.rules.values().chain(&self.terminals).map(TerminalSet::len);
        first.chain(behind).sum()
    }

    fn first_of(&self, node: &GbnfNode) -> (TerminalSet, bool) {
        match node {
            GbnfNode::Terminal(at) => ([*at].into(), self.is_empty[*at]),
            GbnfNode::Rule(rule) => self.first.get(rule).cloned().unwrap_or_default(),
            GbnfNode::Sequence(parts) => self.first_of_all(parts),
            GbnfNode::Choice(all) => {
                all.iter().fold(Default::default(), |(mut set, empty), one| {
                    let (more, is_empty) = self.first_of(one);
                    set.extend(more);
                    (set, empty || is_empty)
                })
            }
            GbnfNode::Repeat(one, least, _) => {
                let (set, is_empty) = self.first_of(one);
                (set, is_empty || *least == 0)
            }
            GbnfNode::Text(_) | GbnfNode::Class(_) => Default::default(),
        }
    }

    fn first_of_all(&self, parts: &[GbnfNode]) -> (TerminalSet, bool) {
        let mut set = TerminalSet::new();
        for part in parts {
            let (more, is_empty) = self.first_of(part);
            set.extend(more);
            if !is_empty {
                return (set, false);
            }
        }
        (set, true)
    }

    /// Notes what may stand behind all parts of a node, which stands before `behind`.
    fn walk(&mut self, node: &GbnfNode, behind: &TerminalSet) {
        match node {
            GbnfNode::Terminal(at) => self.terminals[*at].extend(behind),
            GbnfNode::Rule(rule) => self.rules.entry(*rule).or_default().extend(behind),
            GbnfNode::Sequence(parts) => {
                for (at, part) in parts.iter().enumerate() {
                    let (mut next, is_empty) = self.first_of_all(&parts[at + 1..]);
                    next.extend(behind.iter().filter(|_| is_empty));
                    self.walk(part, &next);
                }
            }
            GbnfNode::Choice(all) => all.iter().for_each(|one| self.walk(one, behind)),
            GbnfNode::Repeat(one, ..) => {
                let mut next = self.first_of(one).0;
                next.extend(behind);
                self.walk(one, &next);
            }
            GbnfNode::Text(_) | GbnfNode::Class(_) => {}
        }
    }
}
