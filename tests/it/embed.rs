//! A node in another program: the examples of the crate, as they are.

use super::process::{Folder, get};
use cresset_base::{Clock, SystemClock};
use cresset_node::Assembly;
use cresset_node::config::Config;
use cresset_prover::Prover;
use cresset_qualification::Suite;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[path = "../../src/node/examples/embed.rs"]
#[allow(dead_code, reason = "its main is that of the example")]
mod embed_example;
#[path = "../../src/node/examples/router.rs"]
#[allow(dead_code, reason = "its main is that of the example")]
mod router_example;

/// A folder whose model was proven by this very program.
async fn proven_here() -> Folder {
    let folder = Folder::ready();
    let path = folder.path().to_owned();
    let proving = move || {
        let assembly = Assembly::new(path, Config::default()).unwrap();
        let catalogue = assembly.catalogue();
        let manifest = catalogue.find("tiny").unwrap();
        let record = Prover(&assembly).qualify(&manifest, Suite::Quick, None, &mut |_| ()).unwrap();
        catalogue.accept(&record, true, "it is a test's", SystemClock.now()).unwrap();
    };
    tokio::task::spawn_blocking(proving).await.unwrap();
    folder
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_asks_its_own_node_and_pays_as_over_http() {
    let folder = proven_here().await;
    let charged = embed_example::run(folder.path(), "tiny").await.unwrap();
    let requests = folder.json(&["requests", "list", "--account", "embedded"]);
    assert_eq!(requests["data"][0]["chargedUnits"], charged.to_string(), "{requests}");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_router_serves_the_surface_beside_its_own_routes() {
    let folder = proven_here().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let path = folder.path().to_owned();
    let serving = tokio::spawn(async move {
        let until = async { drop(stopped.await) };
        router_example::serve(&path, "tiny", listener, until).await.map_err(|why| why.to_string())
    });
    // The listener is bound already, so a request waits until the node serves.
    let asking = move || {
        let base = format!("http://{address}");
        ["/hello", "/v1/models"].map(|path| get(&base, path).status)
    };
    assert_eq!(tokio::task::spawn_blocking(asking).await.unwrap(), [200, 401]);
    stop.send(()).unwrap();
    assert_eq!(serving.await.unwrap(), Ok(()));
}
