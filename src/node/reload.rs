//! Reads again, while a node runs, what it can take over without a restart.

use super::{Assembly, NodeError, RunningNode};

impl Assembly {
    /// Offers the releases that were qualified since the node started, and returns their names. The
    /// ones that it serves already go on as they are.
    pub async fn offer_news(&self, running: &RunningNode) -> Result<Vec<String>, NodeError> {
        let assembly = self.clone();
        let reading = tokio::task::spawn_blocking(move || assembly.servable(&[]));
        let mut models = reading.await.map_err(NodeError::new)??.models;
        let node = running.services();
        models.retain(|model| node.pool.get(model.id()).is_none());
        if models.is_empty() {
            return Ok(Vec::new());
        }
        let offered = self.offer(node, models, 0, &mut |_| ()).await?;
        Ok(offered.into_iter().map(|(_, name)| name).collect())
    }
}
