//! The completions surface for the checks of a qualification: the router, ledger, pool and request
//! path that clients get, in front of the engine that is being qualified. It listens on loopback
//! with a key of its own and a ledger that is thrown away.

use super::http_client::{CompletionsClient, HttpBounds};
#[cfg(feature = "self-test")]
use super::self_test::SpoiledExchange;
use cresset_base::SystemClock;
use cresset_catalogue::{Catalogue, Manifest};
use cresset_commands::{AdminCommand, Operator};
use cresset_engine::EngineHandle;
use cresset_node::config::Config;
use cresset_node::{Assembly, NodeError, api, limited, services};
use cresset_pool::{LoadedEngine, ServedModel};
use cresset_qualification::ApiManner;
use cresset_request::{Plan, Services};
use cresset_store::{Limits, Store, StoreConfig};
use cresset_text::TextModel;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// Plenty for every request that the checks send.
const CREDITS: u64 = 1 << 50;

/// Opens the surface when a check asks it for the first time.
pub(super) struct LazySurface {
    assembly: Assembly,
    manifest: Manifest,
    open: Option<PrivateSurface>,
    /// A fault that is planted between the socket and the router.
    #[cfg(feature = "self-test")]
    pub(super) fault: Option<cresset_qualification::testing::planted_faults::PlantedFault>,
}

impl LazySurface {
    pub(super) fn new(assembly: Assembly, manifest: Manifest) -> Self {
        Self {
            assembly,
            manifest,
            open: None,
            #[cfg(feature = "self-test")]
            fault: None,
        }
    }

    pub(super) fn client(
        &mut self,
        text: &Arc<TextModel>,
        engine: &EngineHandle,
    ) -> Result<&mut CompletionsClient, NodeError> {
        if self.open.is_none() {
            let (text, engine) = (text.clone(), engine.clone());
            let spoil = Spoiled {
                #[cfg(feature = "self-test")]
                change: self.fault.map(|fault| Arc::new(SpoiledExchange(fault)) as _),
            };
            let (assembly, manifest) = (&self.assembly, &self.manifest);
            let surface = PrivateSurface::open(assembly, manifest, text, engine, spoil)?;
            self.open = Some(surface);
        }
        let surface = self.open.as_mut().expect("invariant: it was opened above");
        Ok(&mut surface.client)
    }

    /// Closes the surface, because its engine ends. The next request opens another one.
    pub(super) fn close(&mut self) {
        self.open = None;
    }
}

/// A fault in front of the routes, in builds that may plant one.
struct Spoiled {
    #[cfg(feature = "self-test")]
    change: Option<Arc<dyn cresset_transport::ChangedExchange>>,
}

struct PrivateSurface {
    client: CompletionsClient,
    stop: CancellationToken,
    /// Taken when the surface is closed.
    runtime: Option<Runtime>,
    folder: PathBuf,
}

impl PrivateSurface {
    /// Opens the surface over a loaded engine. Blocking.
    fn open(
        assembly: &Assembly,
        manifest: &Manifest,
        text: Arc<TextModel>,
        engine: EngineHandle,
        spoil: Spoiled,
    ) -> Result<Self, NodeError> {
        let records = assembly.data_dir.join("qualification").join(&manifest.name);
        let folder = throw_away_folder(&records)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(NodeError::new)?;
        let stop = CancellationToken::new();
        let bounds = HttpBounds::of(&assembly.config);
        let client = CompletionsClient::new("", None, bounds);
        let mut surface = Self { client, stop, runtime: Some(runtime), folder };
        surface.start(assembly, manifest, text, engine, spoil)?;
        Ok(surface)
    }

    fn start(
        &mut self,
        assembly: &Assembly,
        manifest: &Manifest,
        text: Arc<TextModel>,
        engine: EngineHandle,
        spoil: Spoiled,
    ) -> Result<(), NodeError> {
        let context = engine.options().max_context;
        let candidate = assembly.catalogue().candidate(manifest, context);
        let model = ServedModel {
            qualified: candidate.map_err(NodeError::new)?,
            text,
            max_context: context,
            context_rises: false,
            load: Arc::new(move |_| Ok(LoadedEngine { engine: engine.clone(), bytes: 0 })),
        };
        let id = model.qualified.id();
        let config = unbounded(&assembly.config);
        let opening = serve(config, self.folder.clone(), model, self.stop.clone(), spoil);
        let runtime = self.runtime.as_ref().expect("invariant: closed only when dropped");
        let (address, key) = runtime.block_on(opening)?;
        let bounds = HttpBounds::of(&assembly.config);
        self.client = CompletionsClient::new(&format!("http://{address}/v1"), Some(key), bounds);
        self.client.model = id.to_string();
        self.client.is_node = true;
        self.client.manner = ApiManner::own();
        Ok(())
    }
}

/// Serves the model over a new ledger in `folder`. Returns the address, and a key.
async fn serve(
    config: Config,
    folder: PathBuf,
    model: ServedModel,
    stop: CancellationToken,
    spoil: Spoiled,
) -> Result<(SocketAddr, String), NodeError> {
    let ledger = StoreConfig::folder(&folder);
    Store::init(&ledger).map_err(NodeError::new)?;
    let store = Store::open(&ledger, Arc::new(SystemClock), Limits::default());
    let store = store.map_err(NodeError::new)?;
    let catalogue = Catalogue::new(&folder);
    let node = services(&config, store, catalogue, None);
    let id = model.qualified.id();
    node.pool.offer(model, 0, true).map_err(NodeError::new)?;
    node.pool.preload(id).await.map_err(NodeError::new)?;
    let key = customer(&node, &config).await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(NodeError::new)?;
    let address = listener.local_addr().map_err(NodeError::new)?;
    let [limits, ..] = limited(&config);
    #[cfg(feature = "self-test")]
    let routes = cresset_transport::changed(cresset_api::router(api(&node, &config)), spoil.change);
    #[cfg(not(feature = "self-test"))]
    let (Spoiled {}, routes) = (spoil, cresset_api::router(api(&node, &config)));
    tokio::spawn(
        async move { cresset_transport::serve(listener, None, routes, &limits, stop).await },
    );
    Ok((address, key))
}

impl Drop for PrivateSurface {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        // What is left goes with the next qualification of this release.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl HttpBounds {
    pub(super) fn of(config: &Config) -> Self {
        let settings = &config.qualification;
        Self {
            calls: settings.http_max_calls,
            answer_bytes: settings.http_max_answer_mib << 20,
            answer_time: std::time::Duration::from_secs(settings.http_answer_seconds),
        }
    }
}

/// The node's settings with one plan that bounds nothing.
fn unbounded(config: &Config) -> Config {
    let plan = Plan { requests_per_minute: 1 << 24, burst: 1 << 24, ..Plan::default() };
    let mut config = Config { plans: [("default".to_owned(), plan)].into(), ..config.clone() };
    config.requests.min_free_mib = 0;
    config.traces.endpoint = None;
    config
}

/// A new folder beside the records. Those of runs that were killed are removed: no process has
/// their ledgers open.
fn throw_away_folder(records: &Path) -> Result<PathBuf, NodeError> {
    const PREFIX: &str = "http-";
    let unmade = |error| NodeError::new(format!("cannot work in {}: {error}", records.display()));
    std::fs::create_dir_all(records).map_err(unmade)?;
    for entry in std::fs::read_dir(records).map_err(unmade)?.flatten() {
        let old = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let unused = || Store::lock(&StoreConfig::folder(entry.path())).is_ok();
        if old && unused() {
            std::fs::remove_dir_all(entry.path()).map_err(unmade)?;
        }
    }
    let folder = records.join(format!("{PREFIX}{}", uuid::Uuid::now_v7()));
    std::fs::create_dir(&folder).map_err(unmade)?;
    Ok(folder)
}

/// Makes an account with credits, and returns a key for it.
async fn customer(node: &Services, config: &Config) -> Result<String, NodeError> {
    let settings = config.operator();
    let operator = Operator::of_store(&node.store, &settings);
    let run = async |command| operator.execute(command).await.map_err(NodeError::new);
    let account = AdminCommand::AccountCreate {
        name: "qualification".into(),
        plan: None,
        trial: CREDITS,
        premium: 0,
        reference: None,
    };
    let account = run(account).await?["id"].as_str().and_then(|id| id.parse().ok());
    let account = account.ok_or_else(|| NodeError::new("an account was made without an id"))?;
    let key = run(AdminCommand::KeyCreate { account, label: None, expires_at: None }).await?;
    let secret = key["secret"].as_str();
    secret.map(str::to_owned).ok_or_else(|| NodeError::new("a key was made without a secret"))
}
