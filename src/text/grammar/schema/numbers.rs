//! The numbers of a schema. The library rounds what a float of 64 bits cannot hold, and bounds no
//! digits. Numbers that it cannot write as they should be are terminals of their own: a constant
//! stands in their place until the grammar is compiled, and is then exchanged.

use super::exact::{Decimal, has_odd_number, odd_number};
use super::ranges::{self, RangeBound};
use super::tree::{self, has_rules_beside, is_alone, visit};
use super::{Bounds, SchemaRefused, inside};
use llguidance::derivre::RegexAst;
use llguidance::earley::lexerspec::{LexemeSpec, LexerSpec};
use serde_json::{Map, Value, json};

/// The unit of numbers with bounds, which are never written with an exponent. The library counts a
/// digit times ten to the number of decimals in 32 bits, so that eight are the most.
const UNIT: f64 = 1e-8;
/// Bounds that integers and other numbers get where the schema has none; floats hold both exactly.
const WIDEST_INTEGER: i64 = 9_223_372_036_854_774_784;
const WIDEST: i64 = 10_000_000_000_000_000;
/// What the library writes of numbers without bounds, and what stands in its place.
const PLAIN: [(&str, &str); 2] = [
    ("-?(0|[1-9][0-9]*)", "-?(0|[1-9][0-9]{0,19})"),
    (
        r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
        r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?",
    ),
];
/// The first constant that stands for a terminal. No constant of a schema that the library gets as
/// a number is as large.
const FIRST_STAND_IN: i64 = 1 << 60;
const STAND_INS_APART: i64 = 1 << 10;
/// Lists that are longer limit no answer.
const ENDLESS: f64 = 1e9;

const BOUNDS: [&str; 4] = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];
/// Rules that are looked at where such a value stands among constants.
const BESIDE_VALUES: [&str; 7] =
    ["const", "enum", "type", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
const COMBINED: &str = "its exact value is not kept where rules are combined (allOf, or rules \
    beside a reference or a value): write it once, without them";

/// Terminals of the numbers in all schemas of one format.
#[derive(Debug, Default)]
pub(in super::super) struct Terminals {
    has_schemas: bool,
    expressions: Vec<String>,
}

impl Terminals {
    /// The constant that stands for numbers of this expression, and the name of its definition.
    fn stand_in(&mut self, expression: String) -> (i64, String) {
        let known = self.expressions.iter().position(|known| *known == expression);
        let at = known.unwrap_or_else(|| {
            self.expressions.push(expression);
            self.expressions.len() - 1
        });
        (FIRST_STAND_IN + at as i64 * STAND_INS_APART, format!("cresset-number-{at}"))
    }

    /// Puts the terminals in the places of what stands for them. Each keeps its number, by which
    /// the grammar knows it.
    pub(in super::super) fn put_into(&self, lexer: &mut LexerSpec) -> Result<(), String> {
        if !self.has_schemas {
            return Ok(());
        }
        let plain = PLAIN.iter().map(|(stands, put)| ((*stands).to_owned(), (*put).to_owned()));
        let stand_in = |at| format!("({})", FIRST_STAND_IN + at as i64 * STAND_INS_APART);
        let own = self.expressions.iter().enumerate();
        let own = own.map(|(at, expression)| (stand_in(at), expression.clone()));
        let pairs: Vec<(String, String)> = plain.chain(own).collect();
        let (count, mut exchanged, class) = (lexer.lexemes.len(), Vec::new(), lexer.current_class);
        let mut classes: Vec<_> = lexer.lexemes.iter().map(LexemeSpec::class).collect();
        classes.dedup();
        for class in classes {
            lexer.current_class = class;
            for (stands, put) in &pairs {
                let at = add(lexer, stands)?;
                if at < count {
                    exchanged.push((at, put));
                }
                lexer.lexemes.truncate(count);
            }
        }
        for (at, lexeme) in std::mem::take(&mut lexer.lexemes).into_iter().enumerate() {
            let Some((_, put)) = exchanged.iter().find(|(place, _)| *place == at) else {
                lexer.lexemes.push(lexeme);
                continue;
            };
            lexer.current_class = lexeme.class();
            if add(lexer, put)? != at {
                return Err("two of its numbers are written alike".into());
            }
        }
        lexer.current_class = class;
        Ok(())
    }
}

/// Adds a lexeme of the current class, or finds the one that is the same.
fn add(lexer: &mut LexerSpec, expression: &str) -> Result<usize, String> {
    let expression = RegexAst::Regex(expression.to_owned());
    let added = lexer.add_greedy_lexeme(String::new(), expression, false, None, usize::MAX);
    added.map(|at| at.as_usize()).map_err(|why| why.to_string())
}

/// Bounds the digits of all numbers, and makes terminals of those that the library would round.
pub(super) fn bound(
    schema: &mut Value,
    bounds: Bounds,
    terminals: &mut Terminals,
) -> Result<(), SchemaRefused> {
    terminals.has_schemas = true;
    let (mut combines, mut has_units, mut has_ids) = (false, false, false);
    visit(schema, "", &mut |schema, place| {
        if let Value::Object(members) = schema {
            combines |= combines_rules(members);
            // The unit of a schema's own would have to be brought together with ours.
            has_units |= members.contains_key("multipleOf");
            has_ids |= !place.is_empty() && members.get("$id").is_some_and(Value::is_string);
        }
        Ok(())
    })?;
    let bounds_decimals = bounds == Bounds::Added && !has_units;
    let definitions = Map::new();
    let mut numbers = NumberRules { terminals, definitions, combines, bounds_decimals, has_ids };
    visit(schema, "", &mut |schema, place| match schema {
        Value::Object(members) => numbers.schema(members, place),
        _ => Ok(()),
    })?;
    if let (false, Some(members)) = (numbers.definitions.is_empty(), schema.as_object_mut()) {
        let all = members.entry("$defs").or_insert_with(|| json!({}));
        all.as_object_mut().into_iter().for_each(|all| all.extend(numbers.definitions.clone()));
    }
    Ok(())
}

/// Whether the library has to bring schemas together here, which it cannot do with stand-ins.
fn combines_rules(members: &Map<String, Value>) -> bool {
    let several = |list: &Value| list.as_array().is_some_and(|all| all.len() > 1);
    let beside = |keyword: &&str| members.contains_key(*keyword) && !is_alone(members, keyword);
    members.get("allOf").is_some_and(several)
        || ["allOf", "anyOf", "oneOf", "$ref"].iter().any(beside)
        || (members.contains_key("patternProperties") && members.contains_key("properties"))
}

struct NumberRules<'t> {
    terminals: &'t mut Terminals,
    definitions: Map<String, Value>,
    combines: bool,
    bounds_decimals: bool,
    has_ids: bool,
}

impl NumberRules<'_> {
    fn schema(
        &mut self,
        members: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), SchemaRefused> {
        for data in ["default", "examples", "example"] {
            members.remove(data);
        }
        // The library ignores rules that are younger than the draft named, and reads older
        // spellings in any.
        members.retain(|name, value| name != "$schema" || !value.is_string());
        counts(members, place)?;
        unit(members, place)?;
        self.values(members, place)?;
        self.ranges(members, place)?;
        self.plain_in_unions(members);
        Ok(())
    }

    /// A schema of the terminal's numbers.
    fn terminal(&mut self, expression: String) -> Value {
        let (constant, name) = self.terminals.stand_in(expression);
        self.defined(name, json!({ "const": constant }))
    }

    /// A reference keeps a terminal apart from others, which it would be one expression with.
    fn defined(&mut self, name: String, schema: Value) -> Value {
        let reference = json!({ "$ref": format!("#/$defs/{name}") });
        self.definitions.entry(name).or_insert(schema);
        reference
    }

    /// Constants.
    fn values(
        &mut self,
        members: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), SchemaRefused> {
        for keyword in ["const", "enum"] {
            let values = match members.get(keyword) {
                Some(Value::Array(values)) if keyword == "enum" => values.clone(),
                Some(value) => vec![value.clone()],
                None => continue,
            };
            let (odd, held): (Vec<_>, Vec<_>) = values.into_iter().partition(has_odd_number);
            if odd.is_empty() {
                continue;
            }
            let place = inside(place, keyword);
            if self.combines || has_rules_beside(members, &BESIDE_VALUES) {
                return Err(SchemaRefused::new(&place, COMBINED));
            }
            let mut any = Vec::new();
            for value in odd.iter().filter(|value| may_be(members, value)) {
                any.push(self.constant(value));
            }
            let mut rest = rules_of(members);
            if !held.is_empty() {
                rest.remove(keyword);
                rest.insert("enum".into(), held.into());
                any.push(rest.into());
            }
            if any.is_empty() {
                return Err(SchemaRefused::new(&place, "no value is of its type and bounds"));
            }
            members.insert("anyOf".into(), any.into());
        }
        Ok(())
    }

    /// The schema of one value that holds such numbers.
    fn constant(&mut self, value: &Value) -> Value {
        if let Some(number) = odd_number(value) {
            return self.terminal(number.replace('.', r"\.").replace('+', r"\+"));
        }
        match value {
            Value::Array(items) => {
                let items: Vec<Value> = items.iter().map(|item| self.constant(item)).collect();
                json!({ "type": "array", "minItems": items.len(), "prefixItems": items,
                    "items": false })
            }
            Value::Object(members) => {
                let required: Vec<&String> = members.keys().collect();
                let named =
                    members.iter().map(|(name, value)| (name.clone(), self.constant(value)));
                let properties: Map<String, Value> = named.collect();
                json!({ "type": "object", "properties": properties, "required": required,
                    "additionalProperties": false })
            }
            other => json!({ "const": other }),
        }
    }

    /// Numbers with bounds, or in units.
    fn ranges(
        &mut self,
        members: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), SchemaRefused> {
        let kinds = kinds(members);
        let odd = BOUNDS.into_iter().find(|bound| members.get(*bound).is_some_and(has_odd_number));
        let [has_numbers, has_integers] = ["number", "integer"].map(|kind| kinds.contains(&kind));
        let has_rules = BOUNDS.iter().any(|bound| members.contains_key(*bound));
        let has_unit = members.contains_key("multipleOf");
        match odd {
            _ if !has_rules && !has_unit => return Ok(()),
            Some(bound) if !has_numbers && !has_integers => {
                let why = "the type of the number must stand beside it";
                return Err(SchemaRefused::new(&inside(place, bound), why));
            }
            Some(bound) if has_integers && !has_numbers => {
                return self.wide_integers(members, &kinds, &inside(place, bound));
            }
            _ => {}
        }
        if has_numbers {
            narrow(members, place)?;
        }
        if has_numbers || has_integers {
            let widest = if has_numbers { WIDEST } else { WIDEST_INTEGER };
            for (bounds, widest) in [(&BOUNDS[..2], -widest), (&BOUNDS[2..], widest)] {
                if !bounds.iter().any(|bound| members.contains_key(*bound)) {
                    members.insert(bounds[0].into(), widest.into());
                }
            }
        }
        if has_numbers && has_rules && self.bounds_decimals {
            members.insert("multipleOf".into(), json!(UNIT));
        }
        Ok(())
    }

    /// Integers with a bound that a float does not hold.
    fn wide_integers(
        &mut self,
        members: &mut Map<String, Value>,
        kinds: &[&str],
        place: &str,
    ) -> Result<(), SchemaRefused> {
        let counted = members.contains_key("multipleOf");
        let beside = counted.then_some("multipleOf is not kept to beside it");
        if let Some(why) = self.combines.then_some(COMBINED).or(beside) {
            return Err(SchemaRefused::new(place, why));
        }
        let [least, most] = bounds_of(members);
        let expression = ranges::expression(least.as_ref(), most.as_ref())
            .map_err(|why| SchemaRefused::new(place, why))?;
        let others: Vec<&str> = kinds.iter().copied().filter(|kind| *kind != "integer").collect();
        let mut rest = rules_of(members);
        rest.retain(|name, _| !BOUNDS.contains(&name.as_str()));
        let mut any = vec![self.terminal(expression)];
        if !others.is_empty() {
            rest.insert("type".into(), json!(others));
            any.push(rest.into());
        }
        members.insert("anyOf".into(), any.into());
        Ok(())
    }

    /// Numbers without bounds. Beside others they would be one expression with them, in which they
    /// are not found.
    fn plain_in_unions(&mut self, members: &mut Map<String, Value>) {
        if self.has_ids {
            return;
        }
        let kinds = kinds(members).into_iter().map(str::to_owned).collect::<Vec<_>>();
        let plain = ["number", "integer"].into_iter().find(|kind| kinds.iter().any(|k| k == kind));
        let is_union = kinds.len() > 1 && !members.contains_key("anyOf");
        let values = ["const", "enum", "oneOf", "allOf", "$ref"];
        if let (Some(plain), true) = (plain, is_union)
            && !BOUNDS.iter().chain(&values).any(|name| members.contains_key(*name))
            && !members.contains_key("multipleOf")
        {
            let is_other = |kind: &&String| *kind != "number" && *kind != "integer";
            let others: Vec<&String> = kinds.iter().filter(is_other).collect();
            let mut rest = rules_of(members);
            rest.insert("type".into(), json!(others));
            let number = json!({ "type": plain });
            members.insert("anyOf".into(), json!([rest, number]));
        }
        let alternatives = members.get_mut("anyOf").and_then(Value::as_array_mut);
        for schema in alternatives.into_iter().flatten() {
            let Some(alternative) = schema.as_object() else { continue };
            let kind = alternative.get("type").and_then(Value::as_str).unwrap_or_default();
            if matches!(kind, "number" | "integer") && is_alone(alternative, "type") {
                *schema = self.defined(format!("cresset-{kind}"), json!({ "type": kind }));
            }
        }
    }
}

/// Takes the rules out of a schema, and leaves what describes it.
fn rules_of(members: &mut Map<String, Value>) -> Map<String, Value> {
    let (mut rules, all) = (Map::new(), std::mem::take(members));
    for (name, value) in all {
        let to = if tree::is_rule(&name) { &mut rules } else { &mut *members };
        to.insert(name, value);
    }
    rules
}

fn kinds(members: &Map<String, Value>) -> Vec<&'static str> {
    const KINDS: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
    let named = match members.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        kind => kind.and_then(Value::as_str).into_iter().collect::<Vec<_>>(),
    };
    KINDS.into_iter().filter(|kind| named.contains(kind)).collect()
}

/// Whether a value is of the types and within the bounds that stand beside it.
fn may_be(members: &Map<String, Value>, value: &Value) -> bool {
    let kinds = kinds(members);
    let Some(number) = Decimal::of(value) else {
        let kind = if value.is_array() { "array" } else { "object" };
        return kinds.is_empty() || kinds.contains(&kind);
    };
    let is_kind = |kind: &&str| *kind == "number" || (*kind == "integer" && number.is_integer());
    let [least, most] = bounds_of(members);
    (kinds.is_empty() || kinds.iter().any(is_kind))
        && least
            .is_none_or(|RangeBound { at, exclusive }| number > at || (number == at && !exclusive))
        && most
            .is_none_or(|RangeBound { at, exclusive }| number < at || (number == at && !exclusive))
}

/// The lower and the upper bound. Old drafts say with `true` that a bound is no part of it.
fn bounds_of(members: &Map<String, Value>) -> [Option<RangeBound>; 2] {
    let is_tighter = |lower: bool, one: &Decimal, other: &Decimal| {
        if lower { one >= other } else { one <= other }
    };
    [(true, "minimum", "exclusiveMinimum"), (false, "maximum", "exclusiveMaximum")].map(
        |(lower, with, without)| {
            let at = |name| members.get(name).and_then(Decimal::of);
            let outside = members.get(without) == Some(&Value::Bool(true));
            match (at(with), at(without)) {
                (Some(with), Some(without)) if !is_tighter(lower, &without, &with) => {
                    Some(RangeBound { at: with, exclusive: false })
                }
                (_, Some(at)) => Some(RangeBound { at, exclusive: true }),
                (at, None) => at.map(|at| RangeBound { at, exclusive: outside }),
            }
        },
    )
}

/// Replaces bounds that are wider than any number that is written.
fn narrow(members: &mut Map<String, Value>, place: &str) -> Result<(), SchemaRefused> {
    for (at, name) in BOUNDS.into_iter().enumerate() {
        let is_lower = at < 2;
        let odd = members.get(name).filter(|value| has_odd_number(value));
        let Some(bound) = odd.and_then(Decimal::of) else { continue };
        let is_wide = bound.negative == is_lower && bound.whole_digits() > 16;
        if !is_wide {
            let why = "it is a bound that numbers of 64 bits do not hold: write fewer digits";
            return Err(SchemaRefused::new(&inside(place, name), why));
        }
        members.insert(name.into(), if is_lower { -WIDEST } else { WIDEST }.into());
    }
    Ok(())
}

fn counts(members: &mut Map<String, Value>, place: &str) -> Result<(), SchemaRefused> {
    for name in COUNTS {
        let Some(value) = members.get(name) else { continue };
        let odd: Option<f64> = odd_number(value).and_then(|number| number.parse().ok());
        let Some(count) = odd.or(value.as_f64()) else { continue };
        let is_huge = count > ENDLESS;
        if is_huge && name.starts_with("max") {
            members.remove(name);
        } else if is_huge || count < 0.0 || count.fract() != 0.0 {
            let why = "it must be a whole number that an answer can reach";
            return Err(SchemaRefused::new(&inside(place, name), why));
        } else if value.as_u64().is_none() {
            members.insert(name.into(), (count as u64).into());
        }
    }
    Ok(())
}

/// Refuses a unit that the library would not count in exactly, in the steps in which it reads one.
fn unit(members: &Map<String, Value>, place: &str) -> Result<(), SchemaRefused> {
    let unit = members.get("multipleOf").filter(|unit| Decimal::of(unit).is_some());
    let Some(unit) = unit else { return Ok(()) };
    let held = unit.as_f64().map(f64::abs).filter(|unit| *unit > 0.0);
    let mut scaled = held.unwrap_or(f64::INFINITY);
    let mut decimals = 0;
    while scaled.fract() != 0.0 && decimals < 10 {
        scaled *= 10.0;
        decimals += 1;
    }
    let counted = Decimal::read(&format!("{scaled:.0}e-{decimals}"));
    let written = Decimal::of(unit).map(|unit| Decimal { negative: false, ..unit });
    if scaled.fract() == 0.0 && scaled <= f64::from(u32::MAX) && counted == written {
        return Ok(());
    }
    let why = "it is a unit that is not counted in exactly: use one of fewer digits";
    Err(SchemaRefused::new(&inside(place, "multipleOf"), why))
}
