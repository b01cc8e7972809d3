//! A node's public surface beside routes of your own, under a server of your own.
//!
//! `cresset quickstart --once --data-dir data` makes a folder with a model.

use axum::{Router, routing::get};
use cresset_node::{Node, config::Config};
use cresset_prover::ensure_qualified;
use std::path::Path;
use tokio::net::TcpListener;

pub async fn serve(
    data_dir: &Path,
    release: &str,
    listener: TcpListener,
    until: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut config = Config::default();
    config.listen.public.set_port(0);
    config.listen.operator.set_port(0);
    ensure_qualified(data_dir, &config, release).await?;
    let node = Node::builder(config).data_dir(data_dir).start().await?;
    let routes = Router::new().route("/hello", get(async || "hello")).merge(node.router());
    axum::serve(listener, routes).with_graceful_shutdown(until).await?;
    node.shutdown().await;
    Ok(())
}

const RELEASE: &str = "smollm2-135m-instruct";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "data".into());
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    serve(Path::new(&folder), RELEASE, listener, interrupted).await
}
