//! `cresset init`: a data folder with an empty ledger.

use super::support::context::Context;
use super::support::output::CommandResult;
use crate::node::ledger;
use serde_json::json;

pub(super) fn run(context: &Context) -> CommandResult {
    ledger::create(&context.data_dir)?;
    context.output.result(&json!({ "data_dir": context.data_dir }), |_| {
        format!(
            "made {}\nnext: cresset accounts create --name NAME --trial 5_000_000\n",
            context.data_dir.display()
        )
    })
}
