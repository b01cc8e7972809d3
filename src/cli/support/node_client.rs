//! A node to talk to: the one that runs on the data folder, or one of our own that ends with the
//! command.

use super::api_client::Asker;
use super::context::Context;
use super::local_key;
use super::output::{Failure, Result};
use crate::cli::launch::{self, Fallback, Ports, Running};
use crate::server::operator::AdminCommand;
use serde_json::Value;

pub struct Host {
    pub asker: Asker,
    /// Absent where the node is another process.
    pub own: Option<Running>,
}

/// `model` is a name or an id; without one the node's first model is meant.
pub async fn open(context: &Context, model: Option<&str>) -> Result<Host> {
    let (status, own) = if let Some(status) = context.ask_node(&AdminCommand::Status).await? {
        (status, None)
    } else {
        let ports = Ports::bind(&context.config.listen, Fallback::AnyPort).await?;
        let wanted: Vec<String> = model.map(str::to_owned).into_iter().collect();
        let running = launch::start(context, ports, &wanted).await?;
        (running.status(), Some(running))
    };
    let base = status["listen"].as_str().unwrap_or_default();
    let asker = local_key::asker(context, base, &pick(&status, model)?).await?;
    Ok(Host { asker, own })
}

impl Host {
    pub async fn close(self) {
        if let Some(running) = self.own {
            running.drain().await;
        }
    }
}

/// The id of the model meant.
fn pick(status: &Value, model: Option<&str>) -> Result<String> {
    let models = status["models"].as_array().map_or(&[][..], Vec::as_slice);
    let meant = |row: &&Value| model.is_none_or(|name| row["name"] == name || row["id"] == name);
    let found = models.iter().find(meant).and_then(|row| row["id"].as_str());
    found.map(str::to_owned).ok_or_else(|| {
        if models.is_empty() {
            let what = "the node of this data folder has no model loaded yet";
            return Failure::new(what).remedy("see `cresset status`, then try again");
        }
        let names: Vec<&str> = models.iter().filter_map(|row| row["name"].as_str()).collect();
        let wanted = model.unwrap_or("any model");
        Failure::new(format!("the node serves {}, and not {wanted}", names.join(", ")))
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
    }
}
