//! A node in a program of your own: asks a question, streams the answer and prints its charge.
//!
//! `cresset quickstart --once --data-dir data` makes a folder with a model.

use cresset_node::{Node, config::Config};
use cresset_prover::ensure_qualified;
use serde_json::json;
use std::path::Path;

pub async fn run(data_dir: &Path, release: &str) -> Result<u64, Box<dyn std::error::Error>> {
    let mut config = Config::default();
    config.listen.public.set_port(0);
    config.listen.operator.set_port(0);
    ensure_qualified(data_dir, &config, release).await?;
    let node = Node::builder(config).data_dir(data_dir).start().await?;
    let client = node.client(&node.open_account("embedded", 1_000_000).await?);
    let model = client.get("/v1/models").await?["data"][0]["id"].take();
    let question = json!({ "role": "user", "content": "What is the capital of France?" });
    let body = json!({ "model": model, "messages": [question], "max_tokens": 24 });
    let mut answer = client.ask(body).await?;
    while let Some(text) = answer.next().await? {
        print!("{text}");
    }
    let charged = answer.into_answer().charged;
    println!("\n{charged} microcredits, and {} is the address for others", node.url());
    node.shutdown().await;
    Ok(charged)
}

const RELEASE: &str = "smollm2-135m-instruct";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "data".into());
    run(Path::new(&folder), RELEASE).await.map(drop)
}
