//! A node to talk to: the one that runs on the data folder, or one of our own that ends with the
//! command.

use super::context::Context;
use super::local_key::{self, KeyChoice};
use super::output::{CommandError, CommandResult, note};
use super::progress::TaskProgress;
use super::service_manager;
use cresset_catalogue::Manifest;
use cresset_client::ApiClient;
use cresset_commands::AdminCommand;
use cresset_node::{Assembly, PortFallback, RunningNode, StartEvent};
use serde_json::Value;

pub(crate) struct NodeClient {
    pub api: ApiClient,
    /// The node that this command started; `None` when the node is another process.
    pub own: Option<RunningNode>,
}

/// Finds or starts a node. `model` is a name or an id; `None` stands for the default release or,
/// where that is not served, for the node's first model.
pub(crate) async fn open(
    context: &Context,
    model: Option<&str>,
    key: &KeyChoice,
) -> CommandResult<NodeClient> {
    let (status, own) = if let Some(status) = context.ask_node(&AdminCommand::Status).await? {
        (status, None)
    } else {
        let wanted: Vec<String> = model.map(str::to_owned).into_iter().collect();
        let running = start(context.assembly()?, PortFallback::AnyPort, &wanted).await?;
        (running.status(), Some(running))
    };
    let base = status["local"].as_str().or(status["listen"].as_str()).unwrap_or_default();
    let model = pick(&status, model)?;
    let api = local_key::client(context, base, &model, key, own.is_some()).await?;
    Ok(NodeClient { api, own })
}

/// Starts a node in this process and shows on stderr what it does meanwhile.
pub(crate) async fn start(
    assembly: &Assembly,
    fallback: PortFallback,
    pinned: &[String],
) -> CommandResult<RunningNode> {
    let mut watched = Watched::default();
    Ok(assembly.start(fallback, pinned, &mut |event| watched.see(event)).await?)
}

/// Has a node of this process take the place of the one that runs.
pub(crate) async fn take_over(
    assembly: &Assembly,
    pinned: &[String],
) -> CommandResult<RunningNode> {
    let mut watched = Watched::default();
    Ok(assembly.take_over(pinned, &mut |event| watched.see(event)).await?)
}

/// Shows the steps of a start, one at a time.
#[derive(Default)]
struct Watched(Option<TaskProgress>);

impl Watched {
    fn see(&mut self, event: StartEvent) {
        self.0 = None;
        match event {
            StartEvent::Note(text) => note(&text),
            StartEvent::TookOver => service_manager::took_over(),
            StartEvent::Doing(what) => {
                service_manager::doing(&what);
                self.0 = Some(TaskProgress::steps(what));
            }
        }
    }
}

impl NodeClient {
    pub(crate) async fn close(self) {
        if let Some(running) = self.own {
            running.drain().await;
        }
    }
}

/// The id of the model that `model` names; without a name, of the default release, or else of the
/// first one.
fn pick(status: &Value, model: Option<&str>) -> CommandResult<String> {
    let models = status["models"].as_array().map_or(&[][..], Vec::as_slice);
    let default = Manifest::default_release().name;
    let wanted = model.unwrap_or(&default);
    let meant = |row: &&Value| row["name"] == wanted || row["id"] == wanted;
    let found = models.iter().find(meant);
    let found = found.or(models.first().filter(|_| model.is_none()));
    let found = found.and_then(|row| row["id"].as_str());
    found.map(str::to_owned).ok_or_else(|| {
        if models.is_empty() {
            let what = "the node of this data folder has no model loaded yet";
            return CommandError::new(what).remedy("see `cresset status`, then try again");
        }
        let names: Vec<&str> = models.iter().filter_map(|row| row["name"].as_str()).collect();
        let wanted = model.unwrap_or("any model");
        CommandError::new(format!("the node serves {}, and not {wanted}", names.join(", ")))
            .remedy("name one of those, or restart the node with --model")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn models_go_by_name_or_id() {
        let status = json!({ "models": [{ "id": "1", "name": "a" }, { "id": "2", "name": "b" }] });
        let check = |model: Option<&str>, expect: Option<&str>| {
            assert_eq!(pick(&status, model).ok().as_deref(), expect);
        };
        check(None, Some("1"));
        check(Some("b"), Some("2"));
        check(Some("2"), Some("2"));
        check(Some("c"), None);
        let default = Manifest::default_release().name;
        let status =
            json!({ "models": [{ "id": "1", "name": "a" }, { "id": "9", "name": default }] });
        assert_eq!(pick(&status, None).ok().as_deref(), Some("9"));
    }
}
