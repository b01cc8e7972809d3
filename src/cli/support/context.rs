//! The things that every command needs: the data folder, the configuration, and a way to the
//! ledger.

use super::output::{CommandError, CommandResult, Output, Render};
use super::values::AccountArgument;
use clap::Args;
use cresset_base::AccountId;
use cresset_client::{HttpCall, json};
use cresset_commands::{AdminCommand, AdminError, socket};
use cresset_node::config::{self, Config, ConfigFile, ConfigSource, LoadedConfig, Override};
use cresset_node::{Assembly, NodeError, files, ledger};
use cresset_tls::NodeAddress;
use serde_json::Value;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
#[cfg(feature = "prover")]
use std::sync::Arc;
use std::time::Duration;

/// Number of tries and pause between them, while another short command holds the folder: 2 s in
/// all.
const LOCK_PATIENCE: (u32, Duration) = (40, Duration::from_millis(50));

#[derive(Args, Debug)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Globals {
    /// Folder of the ledger, models and records [default: the platform's convention, or
    /// CRESSET_DATA_DIR]
    #[arg(long, global = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Configuration file [default: CRESSET_CONFIG, or cresset.toml in the data folder if there is
    /// one]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Open the ledger although this machine's clock differs from its time, and go on from the
    /// clock
    #[arg(long, global = true)]
    pub accept_clock: bool,
    /// Ask the node at the operator address https://HOST:PORT instead, with the operator token in
    /// CRESSET_OPERATOR_TOKEN
    #[arg(long, global = true, value_name = "URL", env = "CRESSET_NODE")]
    pub node: Option<String>,
    /// Print one JSON document on stdout
    #[arg(long, global = true)]
    pub json: bool,
}

pub(crate) struct Context {
    pub data_dir: PathBuf,
    pub config: Config,
    pub output: Output,
    /// The node that commands are sent to in place of that of the data folder.
    pub remote: Option<RemoteNode>,
    source: Option<ConfigSource>,
    assembly: OnceCell<Assembly>,
}

pub(crate) struct RemoteNode {
    address: NodeAddress,
    token: String,
}

impl Context {
    pub(crate) fn new(data_dir: PathBuf, config: Config, output: Output) -> Self {
        Self { data_dir, config, output, remote: None, source: None, assembly: OnceCell::new() }
    }

    /// `attended` means that a person watches the command: unless the user asked for more, the log
    /// then has warnings and errors only.
    pub(crate) fn load(
        globals: &Globals,
        flags: &[Override],
        attended: bool,
    ) -> CommandResult<Self> {
        let data_dir = data_dir(globals)?;
        let mut source = config_source(globals, &data_dir, flags);
        let mut loaded = load_from(&source)?;
        if attended && !loaded.origins.contains_key("log.level") {
            source.flags.push(("log.level".to_owned(), "warn".to_owned()));
            loaded = load_from(&source)?;
        }
        loaded.config.clock.accepted = globals.accept_clock;
        let context = Self::new(data_dir, loaded.config, Output { json: globals.json });
        let remote = match &globals.node {
            Some(url) => Some(context.remote_node(url)?),
            None => None,
        };
        Ok(Self { source: Some(source), remote, ..context })
    }

    /// The parts for a node of our own, with the device on which its models run. The device is
    /// decided at the first call.
    pub(crate) fn assembly(&self) -> CommandResult<&Assembly> {
        if let Some(assembly) = self.assembly.get() {
            return Ok(assembly);
        }
        let mut assembly = Assembly::new(self.data_dir.clone(), self.config.clone())?;
        assembly.source.clone_from(&self.source);
        #[cfg(feature = "prover")]
        {
            assembly.prover = Some(Arc::new(cresset_prover::BackgroundProver));
        }
        Ok(self.assembly.get_or_init(|| assembly))
    }

    /// The configuration file that was named, by a flag or the environment.
    pub(crate) fn named_config(&self) -> Option<&Path> {
        self.source.as_ref()?.file.named()
    }

    /// Where a node is reached, with the trust that this machine's configuration gives.
    pub(crate) fn node_address(&self, url: &str) -> CommandResult<NodeAddress> {
        NodeAddress::new(url, self.config.tls.trusted.as_deref()).map_err(CommandError::new)
    }

    fn remote_node(&self, url: &str) -> CommandResult<RemoteNode> {
        let address = self.node_address(url)?;
        if !address.is_private() {
            let what = format!("{url} would send the operator token readable to others");
            return Err(
                CommandError::new(what).remedy("use https://, or an address of this machine")
            );
        }
        let token = config::operator_token().ok_or_else(|| {
            CommandError::new("--node needs an operator token in CRESSET_OPERATOR_TOKEN")
                .remedy("`cresset admin token create` on the node's machine makes one")
        })?;
        Ok(RemoteNode { address, token })
    }

    /// Runs an operator command in the node that owns the folder, or on the store when no node
    /// runs.
    pub(crate) async fn admin(&self, command: AdminCommand) -> CommandResult<Value> {
        self.patiently(async || self.try_admin(&command).await).await
    }

    /// The id of the account that is meant.
    pub(crate) async fn account(&self, account: AccountArgument) -> CommandResult<AccountId> {
        let name = match account {
            AccountArgument::Id(id) => return Ok(id),
            AccountArgument::Name(name) => name,
        };
        let mut found = self.admin(AdminCommand::AccountFind { name }).await?;
        serde_json::from_value(found["id"].take()).map_err(CommandError::new)
    }

    /// Runs an operator command and prints its result.
    pub(crate) async fn show(&self, command: AdminCommand, render: Render) -> CommandResult {
        self.output.result(&self.admin(command).await?, render)
    }

    /// Tries again for a while as long as `attempt` finds the folder held by another process.
    pub(crate) async fn patiently<T>(
        &self,
        attempt: impl AsyncFn() -> CommandResult<Option<T>>,
    ) -> CommandResult<T> {
        let (tries, pause) = LOCK_PATIENCE;
        for _ in 0..tries {
            match attempt().await? {
                Some(value) => return Ok(value),
                None => tokio::time::sleep(pause).await,
            }
        }
        let what = format!(
            "{} is in use by a node that is still starting or by another command",
            self.data_dir.display()
        );
        Err(CommandError::new(what)
            .remedy("`cresset status` says what a node is doing; wait for it, then try again"))
    }

    /// `None` while another process holds the folder: a node that is starting, or another short
    /// command.
    async fn try_admin(&self, command: &AdminCommand) -> CommandResult<Option<Value>> {
        match self.answer_of_node(command).await? {
            Some(Ok(answer)) => return Ok(Some(answer)),
            Some(Err(AdminError::Starting(_))) => return Ok(None),
            Some(Err(error)) => return Err(CommandError::new(error)),
            None => {}
        }
        Ok(ledger::execute(&self.data_dir, &self.config, command.clone()).await?)
    }

    /// The running node's answer; `None` when no node runs on the folder.
    pub(crate) async fn ask_node(&self, command: &AdminCommand) -> CommandResult<Option<Value>> {
        self.answer_of_node(command).await?.transpose().map_err(CommandError::new)
    }

    async fn answer_of_node(
        &self,
        command: &AdminCommand,
    ) -> CommandResult<Option<Result<Value, AdminError>>> {
        let command = serde_json::to_value(command).map_err(CommandError::new)?;
        let call = HttpCall::post(socket::ROUTE, &command);
        let response = if let Some(RemoteNode { address, token }) = &self.remote {
            call.bearer(token).send(address).await?
        } else {
            ledger::check_rights(&self.data_dir)?;
            match call.send_to_socket(&socket::path(&self.data_dir)).await? {
                Some(response) => response,
                None => return Ok(None),
            }
        };
        let (status, value) = json(response).await?;
        if status.is_success() {
            return Ok(Some(Ok(value)));
        }
        match serde_json::from_value::<AdminError>(value.clone()) {
            Ok(error) => Ok(Some(Err(error))),
            // It comes from the listener, or from what stands before it.
            Err(_) => Err(CommandError::new(format!(
                "the node answered {status}: {}",
                value["message"].as_str().unwrap_or("it is no operator listener")
            ))),
        }
    }
}

pub(crate) fn data_dir(globals: &Globals) -> CommandResult<PathBuf> {
    let dir = globals.data_dir.clone().unwrap_or_else(config::default_data_dir);
    std::path::absolute(&dir)
        .map_err(|error| CommandError::new(format!("{}: {error}", dir.display())))
}

/// The configuration from the named file, or else from the data folder's own if there is one.
pub(crate) fn load_config(
    globals: &Globals,
    data_dir: &Path,
    flags: &[Override],
) -> CommandResult<LoadedConfig> {
    load_from(&config_source(globals, data_dir, flags))
}

fn config_source(globals: &Globals, data_dir: &Path, flags: &[Override]) -> ConfigSource {
    let named = globals.config.clone().or_else(config::default_config_file);
    let own = || ConfigFile::IfThere(data_dir.join(files::CONFIG));
    ConfigSource { file: named.map_or_else(own, ConfigFile::Named), flags: flags.to_vec() }
}

fn load_from(source: &ConfigSource) -> CommandResult<LoadedConfig> {
    source.load().map_err(|error| {
        CommandError::new(error).remedy("`cresset config schema` lists every key with its type")
    })
}

/// The configuration file that is named, or else the data folder's own if there is one.
pub(crate) fn config_file(globals: &Globals, data_dir: &Path) -> Option<PathBuf> {
    config_source(globals, data_dir, &[]).file.path().map(Path::to_owned)
}

/// The configuration file that is named, or else the data folder's own, which need not be there.
pub(crate) fn config_path(globals: &Globals, data_dir: &Path) -> PathBuf {
    match config_source(globals, data_dir, &[]).file {
        ConfigFile::Named(path) | ConfigFile::IfThere(path) => path,
    }
}

impl From<NodeError> for CommandError {
    fn from(NodeError { message, remedy }: NodeError) -> Self {
        Self::Message { what: message, remedy }
    }
}

impl From<cresset_catalogue::Error> for CommandError {
    fn from(error: cresset_catalogue::Error) -> Self {
        Self::new(error)
    }
}
