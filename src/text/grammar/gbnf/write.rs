//! Writes a grammar in Lark. What no rule repeats within itself is one terminal, and is divided
//! where a longer terminal would swallow what may follow.

use super::GbnfNode;
use super::follow::{MOST_WORK, overlapping};
use super::read::GbnfGrammar;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

/// Terminals that are compared with each other. Grammars with more are written by characters.
const MOST_COMPARED: usize = 150;
/// Terminals of a grammar.
const MOST_TERMINALS: usize = 600;
/// Characters of a terminal that is written out.
const MOST_CHARACTERS: usize = 10_000;
/// Times that terminals are divided before all of them are.
const MOST_ROUNDS: usize = 12;

/// The grammar in Lark; the error is a reason with its line.
pub(in super::super) fn to_lark(text: &str) -> Result<String, String> {
    let grammar = GbnfGrammar::read(text)?;
    let lengths = terminal_lengths(&grammar.rules);
    let (mut divided, mut work) = (HashSet::new(), MOST_WORK);
    for round in 0.. {
        let by_characters = round == MOST_ROUNDS;
        let mut shapes = Shapes::new(&grammar, &lengths, &divided, by_characters);
        shapes.add(0);
        if shapes.terminals.len() > MOST_TERMINALS {
            return Err(format!("it has more than {MOST_TERMINALS} terminals"));
        }
        if by_characters {
            return Ok(shapes.lark());
        }
        let found = shapes.to_divide(&mut work);
        if found.is_empty() {
            return Ok(shapes.lark());
        }
        divided.extend(found);
    }
    unreachable!("invariant: the last round returns")
}

/// The characters of each rule that can be a terminal: it leads to no rule that leads back, and is
/// not too long where it is written out.
fn terminal_lengths(rules: &[GbnfNode]) -> Vec<Option<usize>> {
    let mut lengths = vec![None; rules.len()];
    let mut order: Vec<usize> = (0..rules.len()).collect();
    loop {
        let before = lengths.iter().flatten().count();
        for at in &order {
            lengths[*at] = length(&rules[*at], &lengths);
        }
        if lengths.iter().flatten().count() == before {
            return lengths;
        }
        order.reverse();
    }
}

/// The characters of a terminal; `None` for what is none.
fn length(node: &GbnfNode, rules: &[Option<usize>]) -> Option<usize> {
    let own = match node {
        GbnfNode::Text(text) => text.len(),
        GbnfNode::Rule(rule) => rules[*rule]?,
        _ => 1,
    };
    let inner = node.inner().iter().map(|node| length(node, rules)).sum::<Option<usize>>()?;
    Some(own + inner).filter(|length| *length <= MOST_CHARACTERS)
}

fn is_character(node: &GbnfNode) -> bool {
    match node {
        GbnfNode::Text(text) => text.chars().nth(1).is_none(),
        GbnfNode::Class(_) => true,
        _ => false,
    }
}

/// The rules of a grammar over terminals.
struct Shapes<'g> {
    grammar: &'g GbnfGrammar,
    lengths: &'g [Option<usize>],
    divided: &'g HashSet<GbnfNode>,
    by_characters: bool,
    terminals: Vec<GbnfNode>,
    rules: BTreeMap<usize, GbnfNode>,
}

impl<'g> Shapes<'g> {
    fn new(
        grammar: &'g GbnfGrammar,
        lengths: &'g [Option<usize>],
        divided: &'g HashSet<GbnfNode>,
        by_characters: bool,
    ) -> Self {
        let (terminals, rules) = (Vec::new(), BTreeMap::new());
        Self { grammar, lengths, divided, by_characters, terminals, rules }
    }

    /// The terminals that would swallow what may follow another one, and those others.
    fn to_divide(&self, work: &mut u64) -> Vec<GbnfNode> {
        let found = if self.terminals.len() > MOST_COMPARED {
            (0..self.terminals.len()).collect()
        } else {
            overlapping(&self.rules, &self.terminals, &self.grammar.rules, work)
        };
        let found = found.into_iter().map(|at| self.terminals[at].clone());
        found.filter(|node| !is_character(node)).collect()
    }

    /// Adds a rule with all that it leads to.
    fn add(&mut self, rule: usize) {
        let mut open = vec![rule];
        while let Some(rule) = open.pop() {
            if self.rules.contains_key(&rule) {
                continue;
            }
            let shape = self.shape(&self.grammar.rules[rule]);
            shape.for_each_rule(&mut |rule| open.push(rule));
            self.rules.insert(rule, shape);
        }
    }

    fn shape(&mut self, node: &GbnfNode) -> GbnfNode {
        if matches!(node, GbnfNode::Text(text) if text.is_empty()) {
            return GbnfNode::Sequence(Vec::new());
        }
        let is_regular = length(node, self.lengths).is_some();
        let is_whole = !self.by_characters && !self.divided.contains(node);
        if is_regular && (is_whole || is_character(node)) {
            let known = self.terminals.iter().position(|known| known == node);
            return GbnfNode::Terminal(known.unwrap_or_else(|| {
                self.terminals.push(node.clone());
                self.terminals.len() - 1
            }));
        }
        match node {
            GbnfNode::Text(text) => {
                let letters = text.chars().map(|letter| GbnfNode::Text(letter.into()));
                GbnfNode::Sequence(letters.map(|letter| self.shape(&letter)).collect())
            }
            GbnfNode::Sequence(parts) if is_regular => GbnfNode::Sequence(self.shape_each(parts)),
            GbnfNode::Sequence(parts) => GbnfNode::Sequence(self.runs(parts)),
            GbnfNode::Choice(all) if is_regular => GbnfNode::Choice(self.shape_each(all)),
            GbnfNode::Choice(all) => GbnfNode::Choice(self.choices(all)),
            GbnfNode::Repeat(one, least, most) => {
                GbnfNode::Repeat(Box::new(self.shape(one)), *least, *most)
            }
            GbnfNode::Rule(_) | GbnfNode::Class(_) | GbnfNode::Terminal(_) => node.clone(),
        }
    }

    fn shape_each(&mut self, all: &[GbnfNode]) -> Vec<GbnfNode> {
        all.iter().map(|one| self.shape(one)).collect()
    }

    /// The alternatives of a choice, with one terminal for those that can be one.
    fn choices(&mut self, all: &[GbnfNode]) -> Vec<GbnfNode> {
        let lengths = self.lengths;
        let is_regular = |one: &&GbnfNode| length(one, lengths).is_some();
        let (regular, others): (Vec<&GbnfNode>, _) = all.iter().partition(is_regular);
        let whole = GbnfNode::Choice(regular.iter().copied().cloned().collect());
        if regular.len() < 2 || length(&whole, lengths).is_none() {
            return self.shape_each(all);
        }
        let mut shapes = vec![self.shape(&whole)];
        shapes.extend(others.into_iter().map(|one| self.shape(one)));
        shapes
    }

    /// The parts of a sequence, with one terminal for those that follow each other and can be one.
    fn runs(&mut self, parts: &[GbnfNode]) -> Vec<GbnfNode> {
        let lengths = self.lengths;
        let kind = |part: &GbnfNode| length(part, lengths).is_some();
        let runs = parts.chunk_by(|one, next| kind(one) && kind(next));
        let mut shapes = Vec::new();
        for run in runs {
            let whole = GbnfNode::Sequence(run.to_vec());
            if run.len() > 1 && kind(&whole) {
                shapes.push(self.shape(&whole));
            } else {
                shapes.extend(self.shape_each(run));
            }
        }
        shapes
    }

    fn lark(&self) -> String {
        let mut lark = String::from("start: rule_0\n");
        for (rule, shape) in &self.rules {
            let _ = writeln!(lark, "rule_{rule}: {}", written(shape));
        }
        for (at, terminal) in self.terminals.iter().enumerate() {
            let _ = writeln!(lark, "TERMINAL_{at}: {}", written_terminal(terminal));
        }
        // Those of rules that terminals name.
        for (rule, node) in self.grammar.rules.iter().enumerate() {
            if self.lengths[rule].is_some() {
                let _ = writeln!(lark, "RULE_{rule}: {}", written_terminal(node));
            }
        }
        lark
    }
}

/// A part of a rule.
fn written(node: &GbnfNode) -> String {
    write_node(node, "rule_")
}

/// A part of a terminal.
fn written_terminal(node: &GbnfNode) -> String {
    write_node(node, "RULE_")
}

fn write_node(node: &GbnfNode, names: &str) -> String {
    let each = |all: &[GbnfNode], between: &str| {
        let all: Vec<String> = all.iter().map(|one| write_node(one, names)).collect();
        if all.is_empty() { "\"\"".into() } else { format!("({})", all.join(between)) }
    };
    match node {
        GbnfNode::Text(text) => serde_json::json!(text).to_string(),
        GbnfNode::Class(class) => format!("/{class}/"),
        GbnfNode::Rule(rule) => format!("{names}{rule}"),
        GbnfNode::Terminal(terminal) => format!("TERMINAL_{terminal}"),
        GbnfNode::Sequence(parts) => each(parts, " "),
        GbnfNode::Choice(all) => each(all, " | "),
        GbnfNode::Repeat(one, least, most) => {
            let most = most.map_or(String::new(), |most| most.to_string());
            format!("({}){{{least},{most}}}", write_node(one, names))
        }
    }
}
