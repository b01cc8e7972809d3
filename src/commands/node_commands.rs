//! Commands about the node itself: who may give commands, what operators did, models in memory,
//! jobs, links to its page.

use super::command::AdminCommand;
use super::error::AdminError;
use super::operator::Operator;
use super::upgrade::upgrade;
use super::view::{list, merged};
use super::{Live, Role};
use cresset_catalogue::NotedPrices;
use cresset_pool::ModelView;
use cresset_tls::ListenerName;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

type Result<T = Value, E = AdminError> = std::result::Result<T, E>;

impl Operator<'_> {
    pub(super) async fn execute_on_node(&self, command: AdminCommand) -> Result {
        use AdminCommand as C;
        match command {
            C::OperatorTokenCreate { name, roles, expires_at } => {
                let (prefix, now) = (&self.settings.prefix, self.store.now());
                self.files()?.tokens.create(prefix, name, roles, expires_at, now)
            }
            C::OperatorTokenList => Ok(self.files()?.tokens.list()),
            C::OperatorTokenRevoke { name } => self.files()?.tokens.revoke(&name, self.store.now()),
            C::OperatorActs { limit } => self.files()?.acts.latest(limit),
            C::OperatorLink { roles } => self.link(roles),
            C::Upgrade { program } => upgrade(self.live()?, &program).await,
            C::ModelLoad { name } => self.load(&name),
            C::ModelUnload { name } => self.unload(&name),
            C::ModelPrice { name, input, cached_input, output } => {
                self.set_prices(&name, [input, cached_input, output]).await
            }
            C::ModelPriceHistory { name } => self.price_history(&name),
            C::ModelJobStart { job } => {
                let live = self.live()?;
                live.jobs.start(&live.program, job, self.store.now())
            }
            C::ModelJobStop { number } => self.live()?.jobs.stop(number),
            C::ModelJobList => Ok(self.live()?.jobs.list()),
            other => Err(AdminError::Invalid(format!("{other:?} is no command about the node"))),
        }
    }

    fn live(&self) -> Result<&Live> {
        self.live.ok_or_else(|| {
            AdminError::Unavailable("no node runs here: start one with `cresset serve`".into())
        })
    }

    /// An address that opens the operator's page once.
    fn link(&self, roles: BTreeSet<Role>) -> Result {
        let (live, now) = (self.live()?, self.store.now());
        let none = || AdminError::Unavailable("this node has no operator's listener".into());
        let mut at = live.start.operator.ok_or_else(none)?;
        if at.ip().is_unspecified() {
            at.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        let base = live.start.tls.url(ListenerName::Operator, at);
        let code = live.sessions.link(roles, now);
        Ok(json!({ "url": format!("{base}/link/{code}") }))
    }

    /// Writes the manifest and, where a node runs, has it take the prices over.
    async fn set_prices(&self, wanted: &str, given: [Option<u64>; 3]) -> Result {
        let refused = |error: cresset_catalogue::Error| AdminError::Refused(error.to_string());
        let catalogue = &self.files()?.catalogue;
        let before = catalogue.find(wanted).map_err(refused)?;
        let mut manifest = before.clone();
        let prices = &mut manifest.prices;
        let [input, cached_input, output] = given;
        prices.input = input.unwrap_or(prices.input);
        prices.cached_input = cached_input.unwrap_or(prices.cached_input);
        prices.output = output.unwrap_or(prices.output);
        if prices.cached_input > prices.input {
            let text = "a cached prompt token may not cost more than a computed one";
            return Err(AdminError::Invalid(text.into()));
        }
        let is_other = *prices != before.prices;
        prices.revision += u32::from(is_other);
        if is_other {
            catalogue.replace_manifest(&before, &manifest, self.store.now()).map_err(refused)?;
        }
        let problems = match self.live.filter(|_| is_other) {
            Some(_) => self.reload().await?["problems"].take(),
            None => json!([]),
        };
        let more = json!({ "name": manifest.name, "before": before.prices, "problems": problems });
        Ok(merged(json!(manifest.prices), more))
    }

    /// The prices that a release has had since this node takes note of them, and those of now.
    fn price_history(&self, wanted: &str) -> Result {
        let refused = |error: cresset_catalogue::Error| AdminError::Refused(error.to_string());
        let catalogue = &self.files()?.catalogue;
        let manifest = catalogue.find(wanted).map_err(refused)?;
        let noted = catalogue.price_history(&manifest.name).map_err(refused)?;
        let row = |noted: &NotedPrices| {
            merged(json!(noted.prices), json!({ "noted_at": noted.noted_at.seconds() }))
        };
        let present = json!({ "name": manifest.name, "present": manifest.prices });
        Ok(merged(list(noted.iter().map(row)), present))
    }

    fn model(&self, wanted: &str) -> Result<ModelView> {
        let views = self.live()?.node.pool.views();
        let is_meant = |view: &ModelView| {
            let model = &view.model.qualified;
            model.manifest().name == wanted || model.id().to_string() == wanted
        };
        views.into_iter().find(is_meant).ok_or_else(|| {
            AdminError::NotFound(format!(
                "the node serves no model {wanted:?}: see `cresset status`"
            ))
        })
    }

    fn load(&self, wanted: &str) -> Result {
        let (pool, view) = (self.live()?.node.pool.clone(), self.model(wanted)?);
        let (id, name) = (view.model.qualified.id(), view.model.qualified.manifest().name.clone());
        // The load logs its failure, and the status shows it.
        tokio::spawn(async move { pool.preload(id).await });
        Ok(json!({ "id": id, "name": name, "state": "loading" }))
    }

    fn unload(&self, wanted: &str) -> Result {
        let (pool, view) = (&self.live()?.node.pool, self.model(wanted)?);
        let (id, name) = (view.model.qualified.id(), view.model.qualified.manifest().name.clone());
        let refused = |why| AdminError::Refused(format!("{name} is not unloaded: {why}"));
        pool.unload_idle(id).map_err(refused)?;
        Ok(json!({ "id": id, "name": name, "state": "unloading" }))
    }
}
