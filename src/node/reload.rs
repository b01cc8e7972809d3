//! Keeps a running node in step with its data folder and its configuration: once in a while by
//! itself, and wholly when it is asked to: by `cresset reload`, by SIGHUP, or by a command that
//! changed a model.

use super::recheck::Rechecks;
use super::{Assembly, NodeError};
use crate::config::{Config, SettingChange, changes};
use cresset_base::ModelId;
use cresset_catalogue::{Catalogue, Error, Manifest, NotQualified, QualifiedModel};
use cresset_commands::StartState;
use cresset_pool::ServedModel;
use cresset_qualification::HostIdentity;
use cresset_request::Services;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// A caller that waits for the answer to a reload.
pub(super) type AskedReload = oneshot::Sender<Value>;

/// The settings that a running node takes over. All others are read at the start.
fn is_live(key: &str) -> bool {
    key.starts_with("plans.") || key == "qualification.max_age_days"
}

/// Takes over changes, one reload after the other.
pub(super) struct Reloader {
    pub assembly: Assembly,
    pub node: Arc<Services>,
    pub start: Arc<StartState>,
}

/// What a reload found, as the command shows it.
#[derive(Debug, Default, Serialize)]
struct ReloadReport {
    /// Models that are offered since this reload.
    offered: Vec<String>,
    /// Settings and prices that hold for new requests from now on.
    changed: Vec<SettingChange>,
    /// Another certificate is shown to connections from now on.
    certificate: bool,
    /// Keys of settings that have changed and need a restart.
    restart: Vec<String>,
    /// What could not be read or taken over; it stays as it was.
    problems: Vec<String>,
    /// Why releases of the data folder are not offered.
    refused: Vec<String>,
}

/// Whether a model that is served may go on being offered.
enum Standing {
    Qualified(Box<QualifiedModel>),
    Lost(String),
    /// Its files are not those that were qualified.
    FilesChanged(String),
    /// It could not be found out, so nothing changes.
    Unknown(String),
}

impl Reloader {
    /// Answers reloads, and looks at the served models' records and files in between.
    pub(super) async fn run(
        mut self,
        mut asked: mpsc::Receiver<AskedReload>,
        stop: CancellationToken,
    ) {
        let between = Duration::from_secs(self.assembly.config.qualification.review_seconds);
        let mut reviews = tokio::time::interval(between);
        reviews.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first one is due at once, and the start has just looked.
        reviews.tick().await;
        let mut rechecks = Rechecks::new(&self.assembly.config.qualification);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = reviews.tick() => {
                    self.review(false, &mut ReloadReport::default()).await;
                    rechecks.begin_due(&self.node.pool);
                }
                (id, outcome) = rechecks.next() => self.rechecked(id, outcome),
                Some(caller) = asked.recv() => {
                    let answer = self.reload().await;
                    // A caller that has gone needs no answer.
                    let _ = caller.send(answer);
                }
            }
        }
    }

    async fn reload(&mut self) -> Value {
        let mut report = ReloadReport::default();
        self.reread_settings(&mut report);
        match self.start.tls.read_again() {
            Ok(is_other) => report.certificate = is_other,
            Err(why) => report.problems.push(why),
        }
        self.review(true, &mut report).await;
        if let Err(why) = self.offer_news(&mut report).await {
            report.problems.push(why.to_string());
        }
        self.tell_prices(&mut report).await;
        for SettingChange { key, before, now } in &report.changed {
            let [before, now] = [before, now].map(|value| json!(value).to_string());
            tracing::info!(key, before, now, "reload: holds for new requests from now on");
        }
        if !report.restart.is_empty() {
            let keys = report.restart.join(", ");
            tracing::warn!(keys, "reload: these settings have changed and need a restart");
        }
        for why in &report.problems {
            tracing::error!(why, "reload: left as it was");
        }
        if report.certificate {
            tracing::info!("reload: another certificate is shown from now on");
        }
        tracing::info!(offered = report.offered.join(", "), "reload: done");
        let mut answer = json!(report);
        answer["running"] = true.into();
        answer["models"] = self.node.pool.views().iter().map(|view| {
            let qualified = &view.model.qualified;
            let (id, name) = (qualified.id(), &qualified.manifest().name);
            json!({ "id": id, "name": name, "served": view.failure.is_none(), "why": view.failure })
        }).collect();
        answer
    }

    /// Puts changed plans in force. A configuration with any fault changes nothing.
    fn reread_settings(&mut self, report: &mut ReloadReport) {
        let Some(source) = &self.assembly.source else { return };
        let now = match source.load() {
            Ok(loaded) => loaded.config,
            Err(why) => {
                return report.problems.push(format!("the configuration cannot be read: {why}"));
            }
        };
        let config: &mut Config = &mut self.assembly.config;
        let others: Vec<SettingChange>;
        (report.changed, others) =
            changes(config, &now).into_iter().partition(|change| is_live(&change.key));
        report.restart = others.into_iter().map(|change| change.key).collect();
        config.qualification.max_age_days = now.qualification.max_age_days;
        let days = config.qualification.max_age_days;
        self.assembly.max_age_days.store(days, Ordering::Relaxed);
        self.node.metrics.qualification_max_age.set(days as i64 * 86_400);
        config.plans = now.plans;
        self.node.plans.put_in_force(&config.plans);
    }

    /// Looks at manifest, record and files of each served model. With `prices`, those of the
    /// manifest hold from now on.
    async fn review(&self, prices: bool, report: &mut ReloadReport) {
        for model in self.node.pool.models() {
            let (assembly, served) = (self.assembly.clone(), model.qualified.clone());
            let doubt = self.node.pool.has_other_files(served.id());
            let look = move || assembly.standing(&served, doubt);
            let standing = tokio::task::spawn_blocking(look)
                .await
                .unwrap_or_else(|panic| Standing::Unknown(panic.to_string()));
            self.apply(&model, standing, prices, report);
        }
    }

    /// Tells the nodes that share the ledger of the prices here. Those that differ are problems:
    /// what a request costs depends on the node that runs it.
    async fn tell_prices(&self, report: &mut ReloadReport) {
        let data_dir = self.assembly.data_dir.clone();
        let reading = tokio::task::spawn_blocking(move || super::ledger::prices(&data_dir));
        match self.node.store.tell_prices(reading.await.unwrap_or_default()).await {
            Ok(differences) => report.problems.extend(differences),
            Err(why) => {
                report.problems.push(format!("other nodes do not know of the prices: {why}"));
            }
        }
    }

    fn apply(
        &self,
        model: &ServedModel,
        standing: Standing,
        prices: bool,
        report: &mut ReloadReport,
    ) {
        let (id, name) = (model.qualified.id(), &model.qualified.manifest().name);
        match standing {
            Standing::Qualified(now) => {
                let now = if prices {
                    report.changed.extend(price_change(&model.qualified, &now));
                    self.assembly.note_prices(&now, self.node.clock.now());
                    *now
                } else {
                    now.described_by(model.qualified.manifest())
                };
                self.node.pool.describe_anew(now);
                if self.node.pool.offer_again(id) {
                    tracing::info!(%name, "a model is offered again: its qualification is here");
                    report.offered.push(name.clone());
                }
            }
            Standing::FilesChanged(why) => self.take_away(id, name, &why),
            Standing::Lost(why) => {
                if self.node.pool.withhold(id, why.clone()) {
                    tracing::error!(%name, why, "a model is not offered any more");
                }
            }
            Standing::Unknown(why) => {
                tracing::warn!(%name, why, "a model could not be looked at");
                report.problems.push(why);
            }
        }
    }

    fn rechecked(&self, id: ModelId, outcome: cresset_models::Result<()>) {
        let Some(model) = self.node.pool.get(id) else { return };
        let name = &model.qualified.manifest().name;
        match outcome {
            Ok(()) => tracing::debug!(%name, "the files of a model are those that were qualified"),
            Err(cresset_models::Error::Changed(why)) => self.take_away(id, name, &why),
            Err(why) => tracing::warn!(%name, %why, "the files of a model could not be checked"),
        }
    }

    fn take_away(&self, id: ModelId, name: &str, why: &str) {
        if self.node.pool.take_away(id, why.to_owned()) {
            let text = "a model is not offered any more and its requests end: its files changed";
            tracing::error!(%name, why, "{text}");
        }
    }

    /// Offers the releases that were qualified since the node started.
    async fn offer_news(&self, report: &mut ReloadReport) -> Result<(), NodeError> {
        let assembly = self.assembly.clone();
        let reading = tokio::task::spawn_blocking(move || assembly.releases(&assembly.host()));
        let (mut models, refused) = reading.await.map_err(NodeError::new)??;
        models.retain(|model| self.node.pool.get(model.id()).is_none());
        report.refused = refused;
        if models.is_empty() {
            return Ok(());
        }
        let offered = self.assembly.offer(&self.node.pool, models, 0, &mut |_| ()).await?;
        report.offered.extend(offered.into_iter().map(|(_, name)| name));
        Ok(())
    }
}

impl Assembly {
    /// Whether a release that is served is still qualified, by what is in the data folder. Its
    /// files are read where `doubt` or the file system says that they may be others.
    fn standing(&self, served: &QualifiedModel, doubt: bool) -> Standing {
        let manifest = on_disk(&self.catalogue(), served.manifest());
        let host: HostIdentity = self.host();
        match manifest.map(|manifest| self.qualified(&manifest, &host)) {
            Err(standing) => standing,
            Ok(Ok(model)) if doubt || model.stamps() != served.stamps() => self.checked(model),
            Ok(Ok(model)) => Standing::Qualified(Box::new(model)),
            Ok(Err(NotQualified::Files(why @ Error::Io { .. }))) => {
                Standing::Unknown(why.to_string())
            }
            Ok(Err(why)) if why.is_about_bytes() => Standing::FilesChanged(why.to_string()),
            Ok(Err(why)) => Standing::Lost(why.to_string()),
        }
    }

    /// Reads all files of a model whose record holds.
    fn checked(&self, model: QualifiedModel) -> Standing {
        let pace = self.config.qualification.recheck_mib_per_second << 20;
        match model.source().check(pace) {
            Ok(()) => Standing::Qualified(Box::new(model)),
            Err(cresset_models::Error::Changed(why)) => Standing::FilesChanged(why),
            Err(why) => Standing::Unknown(why.to_string()),
        }
    }
}

/// The release's manifest as it is in the data folder.
fn on_disk(catalogue: &Catalogue, served: &Manifest) -> Result<Manifest, Standing> {
    match catalogue.find(&served.name) {
        Ok(now) if now.id == served.id && now.files == served.files => Ok(now),
        Ok(_) => {
            let name = &served.name;
            let why = format!("{name} has other files now: restart the node to serve them");
            Err(Standing::Lost(why))
        }
        Err(why @ (Error::Unknown { .. } | Error::BadRelease { .. })) => {
            Err(Standing::Lost(why.to_string()))
        }
        Err(why) => Err(Standing::Unknown(why.to_string())),
    }
}

fn price_change(before: &QualifiedModel, now: &QualifiedModel) -> Option<SettingChange> {
    let shown = |model: &QualifiedModel| Some(json!(model.prices()));
    (before.prices() != now.prices()).then(|| SettingChange {
        key: format!("prices of {}", now.manifest().name),
        before: shown(before),
        now: shown(now),
    })
}
