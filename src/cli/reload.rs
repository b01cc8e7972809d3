//! `cresset reload`: has the running node take over what changed, and says what that was. Commands
//! that change a model do the same, so that what they say is so.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::text;
use cresset_base::ModelId;
use cresset_commands::AdminCommand;
use serde_json::{Value, json};
use std::fmt::Write;

pub(super) async fn run(context: &Context) -> CommandResult {
    let Some(answer) = ask(context).await? else {
        let what = format!("no node runs on {}", context.data_dir.display());
        return Err(CommandError::new(what).remedy("the next `cresset serve` reads everything"));
    };
    context.output.result(&answer, screen)?;
    let troubled = answer["problems"].as_array().is_some_and(|found| !found.is_empty());
    if troubled { Err(CommandError::Negative) } else { Ok(()) }
}

/// The node's answer; `None` when no node runs.
async fn ask(context: &Context) -> CommandResult<Option<Value>> {
    context.ask_node(&AdminCommand::Reload).await
}

fn rows<'a>(answer: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    answer[name].as_array().into_iter().flatten()
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), text::plain)
}

fn screen(answer: &Value) -> String {
    let mut out = String::new();
    for change in rows(answer, "changed") {
        let [key, before, now] = ["key", "before", "now"].map(|name| word(&change[name]));
        let _ = writeln!(out, "{key}: {before} -> {now}, for new requests");
    }
    if answer["certificate"] == true {
        let _ = writeln!(out, "another certificate is shown to connections from now on");
    }
    for (list, before, after) in [
        ("restart", "", " has changed and needs a restart"),
        ("offered", "", " is served from now on"),
        ("problems", "left as it was: ", ""),
        ("refused", "not served: ", ""),
    ] {
        for row in rows(answer, list) {
            let _ = writeln!(out, "{before}{}{after}", word(row));
        }
    }
    let served = rows(answer, "models").filter(|model| model["served"] == true);
    let names: Vec<String> = served.map(|model| word(&model["name"])).collect();
    let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    let _ = writeln!(out, "the node serves {names}");
    out
}

/// The last line of a command that changed a model. It says whether clients get the model now.
pub(super) struct ServedNow {
    /// `None` when that cannot be told.
    pub served: Option<bool>,
    pub sentence: String,
}

impl ServedNow {
    /// Adds the outcome to the command's document.
    pub(super) fn add_to(&self, document: &mut Value) {
        document["served"] = json!(self.served);
        document["served_because"] = json!(self.sentence);
    }
}

/// Has the running node, if there is one, take over a change of the model.
pub(super) async fn after_change(context: &Context, id: Option<ModelId>, name: &str) -> ServedNow {
    match ask(context).await {
        Ok(None) => ServedNow {
            served: Some(false),
            sentence: "no node runs on this data folder: `cresset serve` starts one".to_owned(),
        },
        Ok(Some(answer)) => served_now(&answer, id, name),
        Err(why) => ServedNow {
            served: None,
            sentence: format!("the running node could not be told ({why}): try `cresset reload`"),
        },
    }
}

fn served_now(answer: &Value, id: Option<ModelId>, name: &str) -> ServedNow {
    let found = rows(answer, "models").find(|model| id.is_some() && model["id"] == json!(id));
    let served = found.is_some_and(|model| model["served"] == true);
    if served {
        let sentence = format!("the running node serves {name}");
        return ServedNow { served: Some(true), sentence };
    }
    let of_node = found.and_then(|model| model["why"].as_str());
    let named = |why: &&str| why.split([' ', ':']).any(|word| word == name);
    let of_release = rows(answer, "refused").filter_map(Value::as_str).find(named);
    let why = of_node.or(of_release).map(|why| format!(": {why}")).unwrap_or_default();
    ServedNow {
        served: Some(false),
        sentence: format!("the running node does not serve {name}{}", text::plain(&why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn the_outcome_is_what_the_node_says() {
        let [served, lost, unknown] = [1, 2, 3].map(|number| ModelId(Uuid::from_u128(number)));
        let answer = json!({
            "models": [
                { "id": served, "name": "a", "served": true, "why": null },
                { "id": lost, "name": "b", "served": false, "why": "b is 91 days old" },
            ],
            "refused": ["c did not qualify"],
        });
        let check = |id, name: &str, expect: (bool, &str)| {
            let ServedNow { served, sentence } = served_now(&answer, Some(id), name);
            assert_eq!((served, sentence.as_str()), (Some(expect.0), expect.1));
        };
        check(served, "a", (true, "the running node serves a"));
        check(lost, "b", (false, "the running node does not serve b: b is 91 days old"));
        check(unknown, "c", (false, "the running node does not serve c: c did not qualify"));
        check(unknown, "d", (false, "the running node does not serve d"));
    }
}
