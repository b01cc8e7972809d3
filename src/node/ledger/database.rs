//! The place of a ledger in a PostgreSQL database, and what the node says of itself there.

use super::prices;
use crate::NodeError;
use crate::config::Config;
use cresset_base::built_at;
use cresset_postgres::PostgresConfig;
use cresset_request::Plan;
use cresset_store::{DatabasePlace, NodeFacts};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The database at an address, with the settings of the configuration.
pub fn database(
    url: &str,
    data_dir: &Path,
    config: &Config,
) -> Result<Arc<dyn DatabasePlace>, NodeError> {
    let settings = &config.ledger;
    let password = settings.password_file.as_deref().map(password).transpose()?;
    let tls = cresset_tls::client(config.tls.trusted.as_deref());
    let tls = tls.map_err(|why| NodeError::new(why).remedy("check tls.trusted"))?;
    let read = PostgresConfig::read(url, password.as_deref(), Arc::new(tls));
    Ok(Arc::new(PostgresConfig {
        settings: settings.clone(),
        lease: Duration::from_secs(settings.lease_seconds),
        folder: Some(data_dir.to_owned()),
        about: facts(data_dir, config),
        ..read.map_err(NodeError::new)?
    }))
}

/// What this node says of itself to those that share its ledger.
fn facts(data_dir: &Path, config: &Config) -> NodeFacts {
    let plan = |(name, plan): (&String, &Plan)| (name.clone(), json!(plan).to_string());
    NodeFacts {
        machine: machine(),
        address: config.listen.public.to_string(),
        build: format!("{} of {}", env!("CARGO_PKG_VERSION"), built_at()),
        plans: config.plans.iter().map(plan).collect(),
        prices: prices(data_dir),
        ..NodeFacts::default()
    }
}

/// The name of this machine, where the system tells it.
fn machine() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// The first line of `ledger.password_file`.
fn password(file: &Path) -> Result<String, NodeError> {
    let read = std::fs::read_to_string(file).map_err(|error| {
        let what = format!("{} cannot be read: {error}", file.display());
        NodeError::new(what).remedy("check ledger.password_file")
    })?;
    Ok(read.lines().next().unwrap_or_default().to_owned())
}
