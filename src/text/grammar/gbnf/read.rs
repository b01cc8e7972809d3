//! Reads a grammar in GBNF. Errors name the line.

use super::GbnfNode;
use std::collections::HashMap;
use std::fmt::Write;

/// Groups inside groups.
const MOST_NESTED: usize = 25;
/// Rules that lead to each other: the library follows them one inside the other.
const MOST_CHAINED: usize = 100;
const MOST_REPEATS: u32 = 10_000;

pub(super) struct GbnfGrammar {
    /// The first is `root`.
    pub rules: Vec<GbnfNode>,
}

pub(super) fn is_of_rule_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '-' || letter == '_'
}

struct GbnfReader<'t> {
    text: &'t str,
    rest: &'t str,
    nested: usize,
    rules: Vec<Option<GbnfNode>>,
    /// The number of each name, and the line that it was first met in.
    names: HashMap<&'t str, (usize, usize)>,
}

impl GbnfGrammar {
    pub(super) fn read(text: &str) -> Result<Self, String> {
        let names = HashMap::new();
        let mut reader = GbnfReader { text, rest: text, nested: 0, rules: Vec::new(), names };
        reader.number("root");
        reader.skip();
        while !reader.rest.is_empty() {
            reader.rule()?;
            reader.skip();
        }
        let missing = reader.names.iter().filter(|(_, (rule, _))| reader.rules[*rule].is_none());
        if let Some((name, (_, line))) = missing.min_by_key(|(_, (_, line))| *line) {
            return Err(match *name {
                "root" => "it has no rule named root".to_owned(),
                _ => format!("line {line}: there is no rule named {name}"),
            });
        }
        let grammar = Self { rules: reader.rules.into_iter().flatten().collect() };
        grammar.check_chains(0, 0, &mut vec![false; grammar.rules.len()])?;
        Ok(grammar)
    }

    fn check_chains(&self, rule: usize, depth: usize, seen: &mut [bool]) -> Result<(), String> {
        if depth > MOST_CHAINED {
            return Err(format!("more than {MOST_CHAINED} of its rules lead to each other"));
        }
        seen[rule] = true;
        let mut named = Vec::new();
        self.rules[rule].for_each_rule(&mut |rule| named.push(rule));
        for rule in named {
            if !seen[rule] {
                self.check_chains(rule, depth + 1, seen)?;
            }
        }
        Ok(())
    }
}

impl<'t> GbnfReader<'t> {
    fn line(&self) -> usize {
        let read = &self.text[..self.text.len() - self.rest.len()];
        1 + read.matches('\n').count()
    }

    fn error<T>(&self, why: &str) -> Result<T, String> {
        Err(format!("line {}: {why}", self.line()))
    }

    fn take(&mut self, text: &str) -> bool {
        let behind = self.rest.strip_prefix(text);
        self.rest = behind.unwrap_or(self.rest);
        behind.is_some()
    }

    fn letter(&mut self) -> Result<char, String> {
        let mut letters = self.rest.chars();
        let Some(letter) = letters.next().filter(|letter| *letter != '\n') else {
            return self.error("a text or a class has no end");
        };
        self.rest = letters.as_str();
        Ok(letter)
    }

    /// Passes over blanks, line breaks and comments.
    fn skip(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find('\n').map_or("", |end| &self.rest[end..]);
        }
    }

    fn word(&mut self) -> &'t str {
        let end = self.rest.find(|letter| !is_of_rule_name(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn number(&mut self, name: &'t str) -> usize {
        let line = self.line();
        let rule = self.names.entry(name).or_insert_with(|| {
            self.rules.push(None);
            (self.rules.len() - 1, line)
        });
        rule.0
    }

    fn rule(&mut self) -> Result<(), String> {
        let name = self.word();
        self.skip();
        if name.is_empty() || !self.take("::=") {
            return self.error("a rule begins with its name and ::=");
        }
        let rule = self.number(name);
        let node = self.choice()?;
        if !self.rest.is_empty() && self.rest.starts_with(')') {
            return self.error("there is a ) without a (");
        }
        if self.rules[rule].replace(node).is_some() {
            return self.error(&format!("the rule {name} is there twice"));
        }
        Ok(())
    }

    fn choice(&mut self) -> Result<GbnfNode, String> {
        let mut all = vec![self.sequence()?];
        while self.take("|") {
            all.push(self.sequence()?);
        }
        Ok(one_or(all, GbnfNode::Choice))
    }

    fn sequence(&mut self) -> Result<GbnfNode, String> {
        let mut parts = Vec::new();
        loop {
            self.skip();
            if self.rest.is_empty() || self.rest.starts_with(['|', ')']) || self.begins_rule() {
                return Ok(one_or(parts, GbnfNode::Sequence));
            }
            let part = self.item()?;
            parts.push(self.repeated(part)?);
        }
    }

    fn begins_rule(&self) -> bool {
        let behind = self.rest.trim_start_matches(is_of_rule_name);
        behind.len() < self.rest.len() && behind.trim_start().starts_with("::=")
    }

    fn item(&mut self) -> Result<GbnfNode, String> {
        if self.take("\"") {
            return self.literal();
        }
        if self.take("[") {
            return self.class();
        }
        if self.take(".") {
            return Ok(GbnfNode::Class("(?s:.)".into()));
        }
        if self.take("(") {
            return self.group();
        }
        match self.word() {
            "" => {
                let letter = self.rest.chars().next().unwrap_or_default();
                self.error(&format!("{letter:?} is nothing that begins a part of a rule"))
            }
            name => Ok(GbnfNode::Rule(self.number(name))),
        }
    }

    fn group(&mut self) -> Result<GbnfNode, String> {
        self.nested += 1;
        if self.nested > MOST_NESTED {
            return self.error("there are too many groups inside each other");
        }
        let inner = self.choice()?;
        self.nested -= 1;
        if self.take(")") { Ok(inner) } else { self.error("a ( has no )") }
    }

    fn literal(&mut self) -> Result<GbnfNode, String> {
        let mut text = String::new();
        while !self.take("\"") {
            text.push(self.escaped()?);
        }
        Ok(GbnfNode::Text(text))
    }

    /// A class, whose characters are written by their numbers: no other sign has a meaning then.
    fn class(&mut self) -> Result<GbnfNode, String> {
        let negated = self.take("^");
        let mut class = String::from(if negated { "[^" } else { "[" });
        let empty = class.len();
        while !self.take("]") {
            let first = self.escaped()?;
            let _ = write!(class, "\\x{{{:x}}}", first as u32);
            if !self.rest.starts_with("-]") && self.take("-") {
                let last = self.escaped()?;
                if last < first {
                    return self.error("a range ends before it begins");
                }
                let _ = write!(class, "-\\x{{{:x}}}", last as u32);
            }
        }
        match (class.len() == empty, negated) {
            (true, true) => Ok(GbnfNode::Class("(?s:.)".into())),
            (true, false) => self.error("a class has no characters"),
            (false, _) => Ok(GbnfNode::Class(class + "]")),
        }
    }

    fn escaped(&mut self) -> Result<char, String> {
        let letter = self.letter()?;
        if letter != '\\' {
            return Ok(letter);
        }
        let digits = match self.letter()? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other if other.is_ascii_punctuation() => return Ok(other),
            other => return self.error(&format!("\\{other} is no escape")),
        };
        let code = self.rest.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        let Some(letter) = code.and_then(char::from_u32) else {
            return self.error(&format!("an escape needs {digits} digits of a character"));
        };
        self.rest = &self.rest[digits..];
        Ok(letter)
    }

    fn repeated(&mut self, mut part: GbnfNode) -> Result<GbnfNode, String> {
        loop {
            self.rest = self.rest.trim_start_matches([' ', '\t']);
            let (least, most) = match self.rest.chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.bounds()?,
                _ => return Ok(part),
            };
            self.rest = &self.rest[1..];
            part = match most {
                Some(0) => GbnfNode::Sequence(Vec::new()),
                _ => GbnfNode::Repeat(Box::new(part), least, most),
            };
        }
    }

    /// The counts in `{m,n}`, up to its last bracket.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), String> {
        let inner = self.rest.find('}').map(|end| &self.rest[1..end]);
        let counts = inner.and_then(|inner| {
            let (least, most) = inner.split_once(',').unwrap_or((inner, inner));
            let count = |text: &str, none: Option<u32>| match text.trim() {
                "" => Some(none),
                digits => digits.parse().ok().map(Some),
            };
            Some((count(least, Some(0))??, count(most, None)?))
        });
        let is_sound = |(least, most): &(u32, Option<u32>)| {
            most.is_none_or(|most| *least <= most && most <= MOST_REPEATS) && *least <= MOST_REPEATS
        };
        let Some((counts, inner)) = counts.filter(is_sound).zip(inner) else {
            return self.error("a repetition is {m}, {m,} or {m,n} with m up to n up to 10000");
        };
        self.rest = &self.rest[inner.len() + 1..];
        Ok(counts)
    }
}

fn one_or(mut all: Vec<GbnfNode>, many: fn(Vec<GbnfNode>) -> GbnfNode) -> GbnfNode {
    if all.len() == 1 { all.remove(0) } else { many(all) }
}
