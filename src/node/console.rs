//! The operator's surfaces of a node: a listener, and a socket in the data folder.

use crate::config::Config;
use crate::handover::{self, SharedListeners};
use crate::running::RunningNode;
use crate::{NodeError, limited};
use cresset_api::openapi::document;
use cresset_commands::{StartState, socket};
use cresset_console::{Console, OperatorRoutes};
use cresset_tls::ListenerName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(super) struct OperatorSurfaces(Arc<OperatorRoutes>);

impl OperatorSurfaces {
    /// Answers at once, also while the node starts.
    pub(super) fn open(
        (config, start): (&Config, &Arc<StartState>),
        data_dir: &Path,
        listener: Option<TcpListener>,
        (surfaces, stop): (&mut JoinSet<()>, &CancellationToken),
    ) -> Result<Self, NodeError> {
        let routes = OperatorRoutes::new(start.clone());
        if let (Some(listener), Some(address)) = (listener, start.operator) {
            let secured = start.tls.acceptor(ListenerName::Operator);
            let [_, limits, _] = limited(config);
            let (answers, stopped) =
                (routes.listener(address, &config.listen.operator_names), stop.clone());
            surfaces.spawn(async move {
                cresset_transport::serve(listener, secured, answers, &limits, stopped).await;
            });
        }
        let bound = socket::bind(data_dir).map_err(|error| {
            let shown = data_dir.display();
            NodeError::new(format!("cannot open the operator socket in {shown}: {error}"))
        })?;
        let (commands, dir, stopped) = (routes.socket(), data_dir.to_owned(), stop.clone());
        surfaces.spawn(async move { cresset_console::serve(bound, commands, &dir, stopped).await });
        Ok(Self(routes))
    }

    /// Passes operators on to the assembled node.
    pub(super) fn pass_on(&self, running: &mut RunningNode) {
        let (api, stop) = (running.api(), running.stop.clone());
        let settings = api.settings.clone();
        let openapi = move || document(&settings);
        let console = Console::new(running.live.clone(), cresset_api::router(api), openapi);
        running.surfaces.spawn(cresset_console::sample(console.clone(), stop));
        self.0.pass_on(&console);
    }
}

impl RunningNode {
    /// Gives the listeners to the first process that asks for them.
    pub(super) fn offer_handover(&mut self, data_dir: PathBuf, shared: SharedListeners) {
        let (taken, stop) = (self.live.handed_over.clone(), self.stop.clone());
        self.surfaces.spawn(handover::give(data_dir, shared, taken, stop));
    }
}
