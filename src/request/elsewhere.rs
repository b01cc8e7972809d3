//! Which other nodes of a shared ledger run a request, or could run it. How a request gets there is
//! the surface's affair.

use super::services::Services;
use cresset_base::ModelId;
use cresset_ledger::RequestRecord;
use cresset_store::{ListedNode, StoreError, StoreResult};
use std::time::Duration;
use uuid::Uuid;

/// The node that runs the request of this record; none where that is this one, or where it takes no
/// requests of other nodes.
pub async fn owner(
    services: &Services,
    record: &RequestRecord,
) -> Result<Vec<ListedNode>, StoreError> {
    let boot = record.latest().boot.0;
    if boot == services.store.boot().0 {
        return Ok(Vec::new());
    }
    others(services, |node| node.boot == boot).await
}

/// The nodes that serve a model which this one does not, those that run the fewest requests first.
pub(super) async fn servers(services: &Services, model: ModelId) -> StoreResult<Vec<ListedNode>> {
    let mut nodes = match services.pool.offered(model) {
        Some(_) => Vec::new(),
        None => others(services, |node| node.facts.models.contains_key(&model.0)).await?,
    };
    nodes.sort_by_key(|node| node.open_reservations);
    Ok(nodes)
}

async fn others(
    services: &Services,
    wanted: impl Fn(&ListedNode) -> bool,
) -> StoreResult<Vec<ListedNode>> {
    let own = services.store.boot().0;
    let mut nodes = services.store.nodes().await?;
    nodes.retain(|node| node.is_running() && node.boot != own && !node.facts.cluster.is_empty());
    nodes.retain(wanted);
    Ok(nodes)
}

/// Returns when another node does not hold its lease any more. What it was asked may then be lost.
pub async fn lease_lost(services: &Services, node: Uuid) {
    let interval = services.store.look_interval().unwrap_or(Duration::MAX);
    loop {
        // Each renewal of the own lease looks at those of others; a node that has just begun is
        // seen by the next one.
        tokio::time::sleep(interval.saturating_mul(2)).await;
        if !services.store.is_alive(node) {
            return;
        }
    }
}
