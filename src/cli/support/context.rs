//! What every command needs: the data folder, the configuration, and a way to the ledger.

use super::http::{Call, json};
use super::output::{Failure, Output, Result};
use crate::cli::Globals;
use crate::clock::SystemClock;
use crate::config::{self, Config, LoadedConfig, Override};
use crate::server::operator::{AdminCommand, AdminError, Operator, socket};
use crate::store::{Limits, Store, StoreError};
use serde_json::{Value, json};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often and how long to try again while another short command holds the folder.
const LOCK_PATIENCE: (u32, Duration) = (40, Duration::from_millis(50));

pub struct Context {
    pub data_dir: PathBuf,
    pub config: Config,
    pub output: Output,
}

impl Context {
    /// `attended`: a person watches the command, so that its log speaks of trouble only unless they
    /// asked for more.
    pub fn load(globals: &Globals, flags: &[Override], attended: bool) -> Result<Self> {
        let data_dir = data_dir(globals)?;
        let LoadedConfig { mut config, origins } = load_config(globals, &data_dir, flags)?;
        if attended && !origins.contains_key("log.level") {
            "warn".clone_into(&mut config.log.level);
        }
        Ok(Self { data_dir, config, output: Output { json: globals.json } })
    }

    /// Runs an operator command in the node that owns the folder, or on the store when no node
    /// runs.
    pub async fn admin(&self, command: AdminCommand) -> Result<Value> {
        self.patiently(async || self.try_admin(&command).await).await
    }

    /// Tries again for a while as long as `attempt` finds the folder held by another process.
    pub async fn patiently<T>(&self, attempt: impl AsyncFn() -> Result<Option<T>>) -> Result<T> {
        let (tries, pause) = LOCK_PATIENCE;
        for _ in 0..tries {
            match attempt().await? {
                Some(value) => return Ok(value),
                None => tokio::time::sleep(pause).await,
            }
        }
        let what = format!(
            "{} is in use by a process that does not answer on its operator socket",
            self.shown()
        );
        Err(Failure::new(what).remedy("wait for it to finish or stop it, then try again"))
    }

    /// `None` while another process holds the folder without listening: it is starting, or a short
    /// command as this one.
    async fn try_admin(&self, command: &AdminCommand) -> Result<Option<Value>> {
        if let Some(answer) = self.ask_node(command).await? {
            return Ok(Some(answer));
        }
        self.require_ledger()?;
        match Store::open_briefly(&self.data_dir, Arc::new(SystemClock), self.limits()) {
            Ok(store) => {
                let operator = Operator { store: &store, config: &self.config, live: None };
                operator.execute(command.clone()).await.map(Some).map_err(Failure::from)
            }
            Err(StoreError::InUse(_)) => Ok(None),
            Err(error) => Err(Failure::new(error)),
        }
    }

    /// The running node's answer; `None` when no node runs on the folder.
    pub async fn ask_node(&self, command: &AdminCommand) -> Result<Option<Value>> {
        let command = serde_json::to_value(command).map_err(Failure::new)?;
        let call = Call::post(socket::ROUTE, &command);
        let Some(response) = call.send_to_socket(&socket::path(&self.data_dir)).await? else {
            return Ok(None);
        };
        let (status, value) = json(response).await?;
        if status.is_success() {
            return Ok(Some(value));
        }
        let error: AdminError = serde_json::from_value(value).map_err(Failure::new)?;
        Err(error.into())
    }

    /// Opens the ledger for a node of our own.
    pub fn open_store(&self) -> Result<Store> {
        self.require_ledger()?;
        let opened = Store::open_with(&self.data_dir, Arc::new(SystemClock), self.limits());
        opened.map_err(|error| match error {
            error @ StoreError::InUse(_) => Failure::new(error).remedy(
                "a node runs there already (`cresset status`); stop it, or give another --data-dir",
            ),
            error => Failure::new(error),
        })
    }

    fn limits(&self) -> Limits {
        let requests = &self.config.requests;
        Limits::of(requests.body_retention_hours, requests.tombstone_days, requests.min_free_mib)
    }

    pub fn require_ledger(&self) -> Result {
        if self.has_ledger() {
            return Ok(());
        }
        let what = format!("there is no ledger in {}", self.shown());
        Err(Failure::new(what)
            .remedy("make one with `cresset init`, or name its folder with --data-dir"))
    }

    pub fn has_ledger(&self) -> bool {
        self.data_dir.join("ledger.redb").exists()
    }

    pub fn init(&self) -> Result {
        self.create_ledger()?;
        let document = json!({ "data_dir": self.data_dir });
        self.output.result(&document, |_| {
            format!(
                "made {}\nnext: cresset accounts create --name NAME --trial 5_000_000\n",
                self.shown()
            )
        })
    }

    /// Makes the folder (a new one is its owner's alone) and an empty ledger; refuses where there
    /// is one.
    pub fn create_ledger(&self) -> Result {
        if self.has_ledger() {
            let what = format!("{} has a ledger already; it is left as it is", self.shown());
            return Err(Failure::new(what).remedy("use it as it is, or give another --data-dir"));
        }
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.data_dir);
        made.map_err(|error| Failure::new(format!("cannot make {}: {error}", self.shown())))?;
        Store::init(&self.data_dir).map_err(Failure::new)
    }

    fn shown(&self) -> std::path::Display<'_> {
        self.data_dir.display()
    }
}

pub fn data_dir(globals: &Globals) -> Result<PathBuf> {
    let dir = globals.data_dir.clone().unwrap_or_else(config::default_data_dir);
    std::path::absolute(&dir).map_err(|error| Failure::new(format!("{}: {error}", dir.display())))
}

/// The configuration from the named file, else from the data folder's own where there is one.
pub fn load_config(globals: &Globals, data_dir: &Path, flags: &[Override]) -> Result<LoadedConfig> {
    let named = globals.config.clone().or_else(config::default_config_file);
    let own = || Some(data_dir.join("cresset.toml")).filter(|path| path.exists());
    let file = named.or_else(own);
    LoadedConfig::load(file.as_deref(), flags).map_err(|error| {
        Failure::new(error).remedy("`cresset config schema` lists every key with its type")
    })
}

impl From<AdminError> for Failure {
    fn from(error: AdminError) -> Self {
        Self::new(error)
    }
}
