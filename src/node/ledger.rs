//! Creates, finds and opens the ledger of a node: in its data folder, or in a database.

#[cfg(feature = "postgres")]
mod database;

use super::NodeError;
use crate::config::Config;
use cresset_base::{SystemClock, built_at};
use cresset_catalogue::{Catalogue, Manifest};
use cresset_commands::{Actor, AdminCommand, Operator, OperatorFiles};
use cresset_store::{
    ClockLimits, DatabasePlace, EmbeddedConfig, Limits, LockedStore, OpenProgress, ReleasePrices,
    Store, StoreConfig, StoreError,
};
#[cfg(feature = "postgres")]
pub use database::database;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// Between two looks at a ledger that another process is about to leave.
#[cfg(feature = "console")]
const BETWEEN_LOOKS: std::time::Duration = std::time::Duration::from_millis(20);

/// The store's limits as the configuration sets them.
pub fn limits(config: &Config) -> Limits {
    Limits {
        requests: config.requests.clone(),
        ledger: config.ledger.clone(),
        clock: ClockLimits::new(&config.clock, built_at()),
    }
}

/// The place of a node's ledger, as the configuration sets it. Fails where a database is named
/// that cannot be meant.
pub fn place(data_dir: &Path, config: &Config) -> Result<StoreConfig, NodeError> {
    let embedded = StoreConfig::Embedded(folder_ledger(data_dir, config));
    let Some(url) = &config.ledger.url else { return Ok(embedded) };
    if Store::exists(&embedded) {
        let shown = data_dir.display();
        let what = format!("ledger.url names a database, and {shown} has a ledger of its own");
        return Err(NodeError::new(what).remedy(
            "take that ledger over with `cresset ledger move`, unset ledger.url, or give another \
             --data-dir",
        ));
    }
    Ok(StoreConfig::Database(database(url, data_dir, config)?))
}

/// The places between which a ledger is moved.
pub fn move_places(
    data_dir: &Path,
    config: &Config,
) -> Result<(EmbeddedConfig, Arc<dyn DatabasePlace>), NodeError> {
    check_rights(data_dir)?;
    let from = folder_ledger(data_dir, config);
    if !Store::exists(&StoreConfig::Embedded(from.clone())) {
        let what = format!("there is no ledger in {} that could be moved", data_dir.display());
        return Err(NodeError::new(what).remedy(
            "name its folder with --data-dir; `cresset init --ledger` makes a new ledger",
        ));
    }
    let url = config.ledger.url.as_deref().unwrap_or_default();
    Ok((from, database(url, data_dir, config)?))
}

fn folder_ledger(data_dir: &Path, config: &Config) -> EmbeddedConfig {
    EmbeddedConfig { settings: config.ledger.clone(), ..EmbeddedConfig::new(data_dir) }
}

/// The database at an address.
#[cfg(not(feature = "postgres"))]
pub fn database(_: &str, _: &Path, _: &Config) -> Result<Arc<dyn DatabasePlace>, NodeError> {
    let what =
        "this program was built without the feature `postgres` and keeps no ledger in a database";
    Err(NodeError::new(what).remedy("use one that was built with it, or unset ledger.url"))
}

/// What the releases of the data folder cost that were qualified here, by their ids.
pub(super) fn prices(data_dir: &Path) -> BTreeMap<String, ReleasePrices> {
    let catalogue = Catalogue::new(data_dir);
    let mut manifests = catalogue.manifests().unwrap_or_default();
    let was_qualified = |name: &str| catalogue.records(name).is_ok_and(|found| !found.is_empty());
    manifests.retain(|manifest| was_qualified(&manifest.name));
    let priced = |Manifest { id, name, prices, .. }: Manifest| {
        let [input, cached_input, output] = [prices.input, prices.cached_input, prices.output];
        (id.to_string(), ReleasePrices { name, input, cached_input, output })
    };
    manifests.into_iter().map(priced).collect()
}

/// What a failover of the database may lose, where that is anything.
pub fn failover_warning(config: &Config) -> Option<String> {
    let is_alone = config.ledger.url.is_some() && config.ledger.standbys == Some(0);
    is_alone.then(|| {
        "ledger.standbys is 0: if the database fails over to a standby, charges and balances that were \
         acknowledged may be lost, and no audit can tell"
            .into()
    })
}

/// Takes the ledger for a node. Fails when there is none, or when another process has it open.
pub(super) fn lock(data_dir: &Path, config: &Config) -> Result<LockedStore, NodeError> {
    require(data_dir, config)?;
    Store::lock(&place(data_dir, config)?).map_err(|error| match error {
        error @ StoreError::InUse(_) => NodeError::new(error).remedy(
            "a node runs there already (`cresset status`); stop it, or give another --data-dir",
        ),
        error => NodeError::new(error),
    })
}

/// `lock` when the node that has the ledger now has ended its work.
#[cfg(feature = "console")]
pub(super) async fn lock_when_free(
    data_dir: &Path,
    config: &Config,
) -> Result<LockedStore, NodeError> {
    require(data_dir, config)?;
    let place = place(data_dir, config)?;
    loop {
        match Store::lock(&place) {
            Err(StoreError::InUse(_)) => tokio::time::sleep(BETWEEN_LOOKS).await,
            other => return other.map_err(NodeError::new),
        }
    }
}

/// Opens the ledger on a thread that may wait. Dropping the future stops the opening.
pub(super) async fn open(
    locked: LockedStore,
    config: &Config,
    progress: Arc<OpenProgress>,
) -> Result<Store, NodeError> {
    struct StopWhenDropped(Arc<OpenProgress>);
    impl Drop for StopWhenDropped {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let limits = limits(config);
    let _stop = StopWhenDropped(progress.clone());
    let opening = spawn_blocking(move || locked.open(Arc::new(SystemClock), limits, &progress));
    opening.await.map_err(NodeError::new)?.map_err(NodeError::new)
}

/// Fails when the folder is there and this user may not work in it, which otherwise looks as if
/// nothing was there.
pub fn check_rights(data_dir: &Path) -> Result<(), NodeError> {
    let work = Access::READ_OK | Access::WRITE_OK;
    let ours = |path: &PathBuf| {
        let kind = path.extension().and_then(|kind| kind.to_str());
        matches!(kind, Some("redb" | "sock")) || path.file_name().is_some_and(|n| n == "lock")
    };
    let files = std::fs::read_dir(data_dir).into_iter().flatten().flatten();
    let files = files.map(|entry| entry.path()).filter(ours).map(|path| (path, work));
    let folder = (data_dir.to_owned(), work | Access::EXEC_OK);
    let denied = |(path, wanted): &(PathBuf, Access)| access(path, *wanted) == Err(Errno::ACCESS);
    let Some((path, _)) = std::iter::once(folder).chain(files).find(denied) else {
        return Ok(());
    };
    let owner = std::fs::metadata(&path).map(|found| found.uid());
    let owner = owner.map_or_else(|_| String::new(), |uid| format!("; it belongs to user {uid}"));
    let (shown, user) = (path.display(), geteuid());
    let user = user.as_raw();
    Err(NodeError::new(format!("{shown} cannot be read and written by user {user}{owner}"))
        .remedy("run the command as the user that owns it, or name another folder with --data-dir"))
}

/// Fails when there is no ledger in the folder, or none that this user may open. A database is
/// asked when it is opened.
pub fn require(data_dir: &Path, config: &Config) -> Result<(), NodeError> {
    check_rights(data_dir)?;
    let place = place(data_dir, config)?;
    if let StoreConfig::Database(_) = place {
        return make_folder(data_dir);
    }
    if Store::exists(&place) {
        return Ok(());
    }
    let what = format!("there is no ledger in {}", data_dir.display());
    Err(NodeError::new(what)
        .remedy("make one with `cresset init`, or name its folder with --data-dir"))
}

/// Makes the folder, readable by its owner alone when it is new, and an empty ledger in it or in
/// the database. Fails when there is a ledger.
pub fn create(data_dir: &Path, config: &Config) -> Result<(), NodeError> {
    check_rights(data_dir)?;
    let place = place(data_dir, config)?;
    let shown = data_dir.display();
    if matches!(place, StoreConfig::Embedded(_)) && Store::exists(&place) {
        let what = format!("{shown} has a ledger already; it is left as it is");
        return Err(NodeError::new(what).remedy("use it as it is, or give another --data-dir"));
    }
    make_folder(data_dir)?;
    Store::init(&place).map_err(NodeError::new)
}

/// Makes the data folder, readable by its owner alone, unless there is one.
pub fn make_folder(data_dir: &Path) -> Result<(), NodeError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir);
    made.map_err(|error| NodeError::new(format!("cannot make {}: {error}", data_dir.display())))
}

/// Runs an operator command on the ledger of a folder on which no node runs. `None` while another
/// process has the ledger open.
pub async fn execute(
    data_dir: &Path,
    config: &Config,
    command: AdminCommand,
) -> Result<Option<Value>, NodeError> {
    require(data_dir, config)?;
    let place = place(data_dir, config)?;
    match Store::open_briefly(&place, Arc::new(SystemClock), limits(config)) {
        Ok(store) => {
            let files = OperatorFiles::open(data_dir).map_err(NodeError::new)?;
            let settings = config.operator();
            let operator =
                Operator { files: Some(&files), ..Operator::of_store(&store, &settings) };
            let executed = operator.execute_for(&Actor::node_user(), command).await;
            executed.map(Some).map_err(NodeError::new)
        }
        Err(error) => not_opened(config, error),
    }
}

/// `None` where another process has the ledger of the folder, which may soon be free. A node that
/// uses the ledger in a database is told of.
pub fn not_opened<T>(config: &Config, error: StoreError) -> Result<Option<T>, NodeError> {
    match error {
        StoreError::InUse(_) if config.ledger.url.is_none() => Ok(None),
        StoreError::InUse(_) => Err(NodeError::new(error).remedy(
            "give the command on the machine of the node that runs, or to that node with --node",
        )),
        error => Err(NodeError::new(error)),
    }
}
