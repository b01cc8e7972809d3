//! Bounds what one rendering of a template may cost.
//!
//! A template is a program of the release's author. The template library counts its steps, but one
//! step may double a string or join a list with itself. The steps that make a value larger are
//! therefore replaced by functions of this file, which charge the bytes they write to the rendering
//! before they write them, and look whether anyone still wants the result.

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Vm, WhitespaceConfig, make_string_output, parse,
};
use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, context, filters};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What one rendering may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateLimits {
    /// Steps of the template's program.
    pub steps: u64,
    /// Bytes of all texts and lists that it makes on the way, the prompt among them.
    pub written_bytes: usize,
}

impl Default for TemplateLimits {
    fn default() -> Self {
        Self { steps: 300_000, written_bytes: 32 << 20 }
    }
}

/// Set once nobody waits for the prompt any more.
pub type Unwanted = Arc<AtomicBool>;

/// A rendering came to one of its limits.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stopped {
    #[error("it writes more than template.max_written_mib allows")]
    TooLarge,
    #[error("it nests values too deeply")]
    TooDeep,
    #[error("nobody waits for it any more")]
    Unwanted,
}

impl From<Stopped> for Error {
    fn from(stopped: Stopped) -> Self {
        Self::new(ErrorKind::InvalidOperation, stopped.to_string()).with_source(stopped)
    }
}

/// Levels of lists in lists that a template may build. Dropping a value takes stack for each.
const DEEPEST: usize = 64;
/// Bytes that an entry of a list is charged with.
const ENTRY_BYTES: usize = 16;
/// Bytes that a lazy sequence is charged with: the longest `range`, written out.
const LAZY_BYTES: usize = 1 << 20;

struct Rendering {
    left: usize,
    unwanted: Unwanted,
}

thread_local! {
    /// The rendering that runs on this thread. Outside of one nothing is charged.
    static CURRENT: RefCell<Option<Rendering>> = const { RefCell::new(None) };
}

/// Charges bytes to the rendering that runs on this thread.
pub(super) fn charge(bytes: usize) -> Result<(), Stopped> {
    CURRENT.with_borrow_mut(|current| {
        let Some(rendering) = current else { return Ok(()) };
        if rendering.unwanted.load(Ordering::Relaxed) {
            return Err(Stopped::Unwanted);
        }
        rendering.left = rendering.left.checked_sub(bytes).ok_or(Stopped::TooLarge)?;
        Ok(())
    })
}

/// A template whose growing steps are charged.
pub(super) struct Program {
    main: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Program {
    /// Compiles a template with Hugging Face's whitespace rules.
    pub(super) fn compile(name: &'static str, source: String) -> Result<Self, Error> {
        // The program refers to its source for as long as the release is offered, which is as long
        // as the process lives.
        let source: &'static str = source.leak();
        let whitespace = WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        };
        let tree = parse(source, name, <_>::default(), whitespace)?;
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (main, blocks) = generator.finish();
        let blocks = blocks.into_iter().map(|(name, block)| (name, charged(block)));
        Ok(Self { main: charged(main), blocks: blocks.collect() })
    }

    pub(super) fn render(
        &self,
        environment: &Environment<'static>,
        root: Value,
        written_bytes: usize,
        unwanted: &Unwanted,
    ) -> Result<String, Error> {
        let rendering = Rendering { left: written_bytes, unwanted: unwanted.clone() };
        CURRENT.set(Some(rendering));
        let mut prompt = String::new();
        let rendered = Vm::new(environment).eval(
            &self.main,
            root,
            &self.blocks,
            &mut make_string_output(&mut prompt),
            AutoEscape::None,
        );
        let rendered = rendered.map(drop);
        CURRENT.set(None);
        rendered.map(|()| prompt)
    }
}

/// The same program with its growing steps replaced. Raw text is printed as a value is, so that it
/// passes the formatter; it becomes two steps, and the targets of jumps move on.
fn charged(mut program: Instructions<'static>) -> Instructions<'static> {
    let count = u32::try_from(program.len()).expect("invariant: steps are numbered in 32 bits");
    let mut places = vec![0];
    for at in 0..count {
        let is_raw = matches!(program.get(at), Some(Instruction::EmitRaw(_)));
        places.push(places[at as usize] + 1 + u32::from(is_raw));
    }
    let mut result = Instructions::new(program.name(), program.source());
    for at in 0..count {
        let line = program.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        let step = program.get_mut(at).expect("invariant: the step exists");
        let step = match std::mem::replace(step, Instruction::Swap) {
            Instruction::EmitRaw(text) => {
                result.add_with_line(Instruction::LoadConst(Value::from(text)), line);
                Instruction::Emit
            }
            step => replaced(step, |old| places[old as usize]),
        };
        result.add_with_line(step, line);
    }
    result
}

/// The step that takes the place of one other than raw text.
fn replaced(step: Instruction<'static>, place: impl Fn(u32) -> u32) -> Instruction<'static> {
    use Instruction as I;
    let call = |name, values: usize, step| match u16::try_from(values) {
        Ok(values) => I::CallFunction(name, Some(values)),
        Err(_) => step,
    };
    match step {
        I::StringConcat => call(CONCAT, 2, step),
        I::Add => call(ADD, 2, step),
        I::Mul => call(MULTIPLY, 2, step),
        I::BuildList(Some(items)) => call(LIST, items, step),
        I::BuildMap(pairs) => call(MAP, pairs * 2, step),
        I::Iterate(old) => I::Iterate(place(old)),
        I::Jump(old) => I::Jump(place(old)),
        I::JumpIfFalse(old) => I::JumpIfFalse(place(old)),
        I::JumpIfFalseOrPop(old) => I::JumpIfFalseOrPop(place(old)),
        I::JumpIfTrueOrPop(old) => I::JumpIfTrueOrPop(place(old)),
        I::BuildMacro(name, old, flags) => I::BuildMacro(name, place(old), flags),
        other => other,
    }
}

// The names are no identifiers, so no template can use or hide them.
const CONCAT: &str = "~";
const ADD: &str = "+";
const MULTIPLY: &str = "*";
const LIST: &str = "[]";
const MAP: &str = "{}";

/// Adds the functions that replace growing steps, and charges the filters.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function(CONCAT, |left: &Value, right: &Value| -> Result<Value, Error> {
        charge(size(left)?.saturating_add(size(right)?))?;
        Ok(Value::from(format!("{left}{right}")))
    });
    environment.add_function(ADD, |state: &State, left: Value, right: Value| {
        if let (Some(one), Some(other)) = (left.as_str(), right.as_str()) {
            charge(one.len() + other.len())?;
            return Ok(Value::from([one, other].concat()));
        }
        charge((entries(&left)? + entries(&right)?) * ENTRY_BYTES)?;
        native(state, "left + right", &left, &right)
    });
    environment.add_function(MULTIPLY, |state: &State, left: Value, right: Value| {
        let times = |value: &Value, count: &Value| -> Result<usize, Stopped> {
            Ok(size(value)?.saturating_mul(count.as_usize().unwrap_or(1)))
        };
        if left.as_str().is_some() || left.try_iter().is_ok() {
            charge(times(&left, &right)?)?;
        } else if right.as_str().is_some() || right.try_iter().is_ok() {
            charge(times(&right, &left)?)?;
        }
        native(state, "left * right", &left, &right)
    });
    environment.add_function(LIST, |items: Rest<Value>| -> Result<Value, Error> {
        let list: Value = items.0.into_iter().collect();
        charge(entries(&list)? * ENTRY_BYTES)?;
        Ok(list)
    });
    environment.add_function(MAP, |values: Rest<Value>| -> Result<Value, Error> {
        let pairs = values.0.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        let map: Value = pairs.collect();
        charge(entries(&map)? * ENTRY_BYTES)?;
        Ok(map)
    });
    charge_filters(environment);
}

/// Filters whose result may be larger than what they are given, or that read all of it.
fn charge_filters(environment: &mut Environment<'static>) {
    let builtin: [(&'static str, Value); 16] = [
        ("batch", Value::from_function(filters::batch)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("escape", Value::from_function(filters::escape)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("lower", Value::from_function(filters::lower)),
        ("pprint", Value::from_function(filters::pprint)),
        ("replace", Value::from_function(filters::replace)),
        ("reverse", Value::from_function(filters::reverse)),
        ("slice", Value::from_function(filters::slice)),
        ("split", Value::from_function(filters::split)),
        ("title", Value::from_function(filters::title)),
        ("upper", Value::from_function(filters::upper)),
    ];
    for (name, filter) in builtin {
        environment.add_filter(name, move |state: &State, arguments: Rest<Value>| {
            if let [value, rest @ ..] = arguments.0.as_slice() {
                charge(cost(name, value, rest)?)?;
            }
            filter.call(state, &arguments.0)
        });
    }
}

/// Bytes that a filter, or a method of the same name, writes at most.
pub(super) fn cost(name: &str, value: &Value, arguments: &[Value]) -> Result<usize, Stopped> {
    let text = |at: usize| arguments.get(at).and_then(Value::as_str).unwrap_or_default();
    let own = match (name, value.as_str()) {
        (_, Some(text)) => text.len(),
        ("join" | "pprint", None) => size(value)?,
        _ => entries(value)?.saturating_mul(ENTRY_BYTES),
    };
    let more = match (name, value.as_str()) {
        ("replace", Some(whole)) => whole.matches(text(0)).count().saturating_mul(text(1).len()),
        // As a method, the value is what comes between the items.
        ("join", Some(between)) if arguments.first().is_some_and(|items| !items.is_undefined()) => {
            let items = arguments.first().map_or(Ok(0), size)?;
            between.len().saturating_mul(items).saturating_add(items)
        }
        ("join", _) => own.saturating_mul(text(0).len()),
        ("indent", Some(whole)) => {
            let widths = arguments.iter().map(numbers).fold(4, usize::saturating_add);
            (whole.matches('\n').count() + 1).saturating_mul(widths)
        }
        ("format", Some(pattern)) => {
            let mut bytes = digits(pattern);
            for argument in arguments {
                bytes = bytes.saturating_add(size(argument)?).saturating_add(numbers(argument));
            }
            bytes
        }
        _ => 0,
    };
    Ok(own.saturating_add(more))
}

/// The sum of the numbers in an argument, with those that are given by name.
fn numbers(argument: &Value) -> usize {
    match argument.kind() {
        ValueKind::Number => argument.as_usize().unwrap_or(0),
        ValueKind::Map => {
            let names = argument.try_iter().into_iter().flatten();
            let values = names.filter_map(|name| argument.get_item(&name).ok()?.as_usize());
            values.fold(0, usize::saturating_add)
        }
        _ => 0,
    }
}

/// The sum of the numbers that are written in a text, such as the widths in a format.
fn digits(text: &str) -> usize {
    let runs = text.split(|letter: char| !letter.is_ascii_digit()).filter(|run| !run.is_empty());
    runs.map(|run| run.parse().unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
}

/// Bytes of a value once it is printed, about.
fn size(value: &Value) -> Result<usize, Stopped> {
    measure(value, 0, &|value| value.as_str().map_or(ENTRY_BYTES, str::len))
}

/// Entries of a list or map with all that is in it; 1 for anything else.
fn entries(value: &Value) -> Result<usize, Stopped> {
    measure(value, 0, &|_| 1)
}

/// Adds `leaf` up over a value. Values that contain each other many times over are paid for as they
/// are walked, so the walk ends.
fn measure(value: &Value, depth: usize, leaf: &dyn Fn(&Value) -> usize) -> Result<usize, Stopped> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map if depth >= DEEPEST => Err(Stopped::TooDeep),
        kind @ (ValueKind::Seq | ValueKind::Map) => {
            let mut sum = 1_usize;
            for mut item in value.try_iter().into_iter().flatten() {
                charge(1)?;
                if kind == ValueKind::Map {
                    sum = sum.saturating_add(leaf(&item));
                    item = value.get_item(&item).unwrap_or_default();
                }
                sum = sum.saturating_add(measure(&item, depth + 1, leaf)?);
            }
            Ok(sum)
        }
        ValueKind::Iterable => Ok(LAZY_BYTES / ENTRY_BYTES),
        _ => Ok(leaf(value)),
    }
}

/// The library's own operation.
fn native(
    state: &State,
    expression: &'static str,
    left: &Value,
    right: &Value,
) -> Result<Value, Error> {
    state.env().compile_expression(expression)?.eval(context! { left, right })
}
