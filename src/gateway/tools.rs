//! Tools that no model here has, because a service of another maker runs them: they are left out,
//! unless a request insists on one.

use super::json_members::{JsonMembers, raw};
use super::left_out::LeftOut;
use serde_json::Value;

const FUNCTION: &str = "function";
/// The members of a tool that the node knows.
const OF_TOOL: [&str; 2] = ["type", FUNCTION];
const OF_FUNCTION: [&str; 4] = ["name", "description", "parameters", "strict"];

/// The tools of a request that were left out, by type and name.
#[derive(Debug, Default)]
pub(super) struct UnservedTools(Vec<(String, String)>);

impl UnservedTools {
    pub(super) fn add(&mut self, kind: &str, name: &str, left_out: &mut LeftOut) {
        left_out.add_member("tools[]", kind);
        self.0.push((kind.to_owned(), name.to_owned()));
    }

    /// Refuses a choice of one of them, by its name or its type; and a choice of `any` where they
    /// were all there was.
    pub(super) fn refuse_choice(&self, of: &str, any_of: Option<usize>) -> Result<(), String> {
        let chosen = self.0.iter().find(|(kind, name)| of == kind || !of.is_empty() && of == name);
        let none_left = self.0.first().filter(|_| any_of == Some(0));
        match chosen.or(none_left) {
            Some((kind, _)) => Err(format!(
                "tool_choice: tools of the type {kind} are not supported: turn them off in the \
                 client."
            )),
            None => Ok(()),
        }
    }
}

/// Leaves out of a chat request the tools that are no functions, and what the node does not know of
/// the others.
pub(super) fn translate(request: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    let Some(mut all) = request.read::<Vec<JsonMembers>>("tools") else { return Ok(()) };
    let mut unserved = UnservedTools::default();
    all.retain(|tool| match tool.text("type") {
        Some(kind) if kind != FUNCTION => {
            let inner: JsonMembers = tool.read(&kind).unwrap_or_default();
            let name = tool.text("name").or_else(|| inner.text("name")).unwrap_or_default();
            unserved.add(&kind, &name, left_out);
            false
        }
        _ => true,
    });
    for tool in &mut all {
        let Some(mut function) = tool.read::<JsonMembers>(FUNCTION) else {
            let is_known = |name: &str| name == "type" || OF_FUNCTION.contains(&name);
            tool.retain("tools[]", left_out, |name, _| is_known(name));
            continue;
        };
        tool.retain("tools[]", left_out, |name, _| OF_TOOL.contains(&name));
        let place = "tools[].function";
        function.retain(place, left_out, |name, _| OF_FUNCTION.contains(&name));
        tool.set(FUNCTION, &function);
    }
    let choice: Value = request.read("tool_choice").unwrap_or_default();
    let named = [&choice["function"]["name"], &choice["name"], &choice["custom"]["name"]];
    let named = named.into_iter().find_map(Value::as_str);
    let kind = choice["type"].as_str().filter(|kind| *kind != FUNCTION);
    let must = choice.as_str().is_some_and(|word| word == "required");
    unserved.refuse_choice(kind.or(named).unwrap_or_default(), must.then_some(all.len()))?;
    for (_, tools) in request.0.iter_mut().filter(|(name, _)| name == "tools") {
        *tools = raw(&all);
    }
    Ok(())
}
