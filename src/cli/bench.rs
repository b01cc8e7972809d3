//! `cresset bench`: measures a node under load, or its ledger.

use super::support::context::Context;
use super::support::local_key::KeyChoice;
use super::support::output::{CommandError, CommandResult};
use super::support::progress::TaskProgress;
use super::support::{node_client, shutdown};
use cresset_bench::{self as bench, MeasureProgress};
use cresset_node::config::client_key;
use serde_json::Value;

pub(super) use cresset_bench::Arguments;

struct ShownProgress(Option<TaskProgress>);

impl MeasureProgress for ShownProgress {
    fn begin(&mut self, what: String) {
        self.0 = None;
        self.0 = Some(TaskProgress::steps(what));
    }

    fn at(&mut self, done: u64, of: u64) {
        if let Some(progress) = &mut self.0 {
            progress.at(done, of);
        }
    }
}

pub(super) async fn run(mut context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    let mut progress = ShownProgress(None);
    if arguments.ledger {
        let place = (&*context.data_dir, &context.config);
        let measuring = async { Ok(bench::ledger(place, &arguments, &mut progress).await?) };
        let document = shutdown::unless_interrupted(&shutdown, measuring).await?;
        context.output.result(&document, bench::show)?;
        return verdict(document["audit_ok"] == true);
    }
    let key = arguments.key.clone().or_else(client_key);
    if let Some(url) = &arguments.url {
        let key = key.ok_or_else(|| {
            CommandError::new("--url needs a key").remedy("give one with --key or in CRESSET_KEY")
        })?;
        let node = context.node_address(url.trim_end_matches('/').trim_end_matches("/v1"))?;
        let measuring = async {
            let api = bench::client(node, &key, arguments.model.as_deref()).await?;
            Ok(bench::node(&api, &arguments, &mut progress).await?)
        };
        let document = shutdown::unless_interrupted(&shutdown, measuring).await?;
        return show(&context, &arguments, &document);
    }
    lift_limits(&mut context);
    let key = KeyChoice::Given(key);
    let opening = node_client::open(&context, arguments.model.as_deref(), &key);
    let client = shutdown::unless_interrupted(&shutdown, opening).await?;
    let measuring = async { Ok(bench::node(&client.api, &arguments, &mut progress).await?) };
    let measured = shutdown::unless_interrupted(&shutdown, measuring).await;
    client.close().await;
    show(&context, &arguments, &measured?)
}

/// Lifts the plans' limits for a node of our own, which proves nothing meanwhile: requests are
/// measured, and nothing else.
fn lift_limits(context: &mut Context) {
    context.config.qualification.background = false;
    for plan in context.config.plans.values_mut() {
        (plan.requests_per_minute, plan.burst, plan.max_concurrent) = (1 << 24, 1 << 24, 1 << 20);
    }
}

fn show(context: &Context, arguments: &Arguments, document: &Value) -> CommandResult {
    context.output.result(document, bench::show)?;
    if document["reads"].is_array() {
        return Ok(());
    }
    if let Some(file) = &arguments.plot {
        bench::plot(file, document)?;
    }
    let levels = document["levels"].as_array().map_or(&[][..], Vec::as_slice);
    verdict(levels.iter().all(|level| level["answered"] != 0))
}

/// Fails when nothing was measured.
fn verdict(good: bool) -> CommandResult {
    if good { Ok(()) } else { Err(CommandError::Negative) }
}
