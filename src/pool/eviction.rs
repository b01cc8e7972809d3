//! Decides which models are in memory: the next one to load and the one to unload for it. Pure: the
//! pool reports events here and carries out the actions.
//!
//! One thing happens at a time: a load, or the unload that makes room for it. The model that
//! requests have waited for longest is loaded next. Room is taken from the least recently used idle
//! model; if none is idle, the least recently used busy one takes no new requests until its work
//! is done. Pinned models stay.

use cresset_base::ModelId;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPhase {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
}

/// One thing that the pool has to do now; `next_action` has already noted it as begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolAction {
    Load(ModelId),
    Unload(ModelId),
    /// All requests that wait for the model may start.
    Grant(ModelId),
}

/// Memory and requests of one model.
#[derive(Clone, Copy, Debug)]
pub struct ModelUsage {
    pub phase: LoadPhase,
    /// Weights and KV cache: an estimate until the model was loaded for the first time.
    pub bytes: u64,
    pub pinned: bool,
    /// Requests that its engine has.
    pub active: usize,
    /// Requests that wait for it.
    pub waiting: usize,
    /// The model is loaded and its waiting requests have not started yet: they start even if
    /// another model is to be loaded in its place.
    just_loaded: bool,
    /// Number of the event at which a request last began or ended.
    last_used: u64,
    /// Number of the event since which requests wait.
    waiting_since: u64,
}

/// The models, the memory that each takes, and the order in which requests for them arrived.
#[derive(Debug)]
pub(super) struct Eviction {
    /// Bytes for all models together.
    budget: u64,
    models: BTreeMap<ModelId, ModelUsage>,
    /// Events so far: a clock that only orders them.
    events: u64,
}

impl Eviction {
    pub(super) fn new(budget: u64) -> Self {
        Self { budget, models: BTreeMap::new(), events: 0 }
    }

    /// Makes a model known; `false` when it could never be loaded beside the pinned ones.
    pub(super) fn offer(&mut self, id: ModelId, bytes: u64, pinned: bool) -> bool {
        let usage = ModelUsage {
            phase: LoadPhase::Unloaded,
            bytes,
            pinned,
            active: 0,
            waiting: 0,
            just_loaded: false,
            last_used: 0,
            waiting_since: 0,
        };
        self.models.insert(id, usage);
        self.fits(id)
    }

    pub(super) fn get(&self, id: ModelId) -> &ModelUsage {
        &self.models[&id]
    }

    pub(super) fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes left for one more model now.
    pub(super) fn free(&self) -> u64 {
        self.budget.saturating_sub(self.held())
    }

    fn held(&self) -> u64 {
        self.models
            .values()
            .filter(|model| model.phase != LoadPhase::Unloaded)
            .map(|model| model.bytes)
            .sum()
    }

    /// True when the request may start now; `end_request` ends it. False when it has to wait.
    pub(super) fn begin_request(&mut self, id: ModelId) -> bool {
        let starts = self.accepts_requests(id);
        let now = self.next_event();
        let model = self.model(id);
        if starts {
            model.active += 1;
            model.last_used = now;
        }
        starts
    }

    pub(super) fn end_request(&mut self, id: ModelId) {
        let now = self.next_event();
        let model = self.model(id);
        model.active -= 1;
        model.last_used = now;
    }

    /// Sets the number of requests that wait for the model now.
    pub(super) fn set_waiting(&mut self, id: ModelId, count: usize) {
        let now = self.next_event();
        let model = self.model(id);
        if model.waiting == 0 {
            model.waiting_since = now;
        }
        model.waiting = count;
    }

    /// Records that a load is done and took `bytes`. False when the model can never fit beside the
    /// pinned ones.
    pub(super) fn finish_load(&mut self, id: ModelId, bytes: u64) -> bool {
        let model = self.model(id);
        (model.phase, model.bytes, model.just_loaded) =
            (LoadPhase::Loaded, bytes, model.waiting > 0);
        self.fits(id)
    }

    /// Records that a loaded model is being unloaded, whatever still runs on it.
    pub(super) fn begin_unload(&mut self, id: ModelId) {
        self.model(id).phase = LoadPhase::Unloading;
    }

    /// Records that the model holds no memory any more.
    pub(super) fn mark_unloaded(&mut self, id: ModelId) {
        self.model(id).phase = LoadPhase::Unloaded;
    }

    /// Returns the next thing to do. To be called after every event, until it returns `None`.
    pub(super) fn next_action(&mut self) -> Option<PoolAction> {
        let ready = |(id, model): &(&ModelId, &ModelUsage)| {
            model.waiting > 0 && (model.just_loaded || self.accepts_requests(**id))
        };
        if let Some((&id, _)) = self.models.iter().find(ready) {
            let now = self.next_event();
            let model = self.model(id);
            model.active += std::mem::take(&mut model.waiting);
            (model.just_loaded, model.last_used) = (false, now);
            return Some(PoolAction::Grant(id));
        }
        if let Some(victim) = self.victim() {
            let model = self.model(victim);
            if model.active > 0 {
                return None;
            }
            model.phase = LoadPhase::Unloading;
            return Some(PoolAction::Unload(victim));
        }
        let id = self.next_to_load().filter(|id| self.models[id].bytes <= self.free())?;
        self.model(id).phase = LoadPhase::Loading;
        Some(PoolAction::Load(id))
    }

    fn fits(&self, id: ModelId) -> bool {
        let others = self.models.iter().filter(|(other, model)| **other != id && model.pinned);
        others.map(|(_, model)| model.bytes).sum::<u64>() + self.models[&id].bytes <= self.budget
    }

    /// Whether a request would start now.
    pub(super) fn accepts_requests(&self, id: ModelId) -> bool {
        self.models[&id].phase == LoadPhase::Loaded && self.victim() != Some(id)
    }

    /// The unloaded model to be loaded next; `None` while another one is loaded or unloaded.
    fn next_to_load(&self) -> Option<ModelId> {
        if self.is_changing() {
            return None;
        }
        let wanted = self
            .models
            .iter()
            .filter(|(_, model)| model.phase == LoadPhase::Unloaded && model.waiting > 0);
        wanted.min_by_key(|(_, model)| model.waiting_since).map(|(id, _)| *id)
    }

    fn is_changing(&self) -> bool {
        self.models
            .values()
            .any(|model| matches!(model.phase, LoadPhase::Loading | LoadPhase::Unloading))
    }

    /// The model to be unloaded, at once if it is idle and otherwise when its work is done: to make
    /// room for the next load, or because a model turned out larger than estimated.
    fn victim(&self) -> Option<ModelId> {
        let needed = self.next_to_load().map_or(0, |id| self.models[&id].bytes);
        if self.is_changing() || self.held() + needed <= self.budget {
            return None;
        }
        let evictable = self
            .models
            .iter()
            .filter(|(_, model)| model.phase == LoadPhase::Loaded && !model.pinned);
        evictable.min_by_key(|(_, model)| (model.active > 0, model.last_used)).map(|(id, _)| *id)
    }

    fn next_event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    fn model(&mut self, id: ModelId) -> &mut ModelUsage {
        self.models.get_mut(&id).expect("invariant: ids come from offered models")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;
    use uuid::Uuid;

    fn id(name: &str) -> ModelId {
        ModelId(Uuid::from_u128(u128::from(name.as_bytes()[0])))
    }

    fn name(id: ModelId) -> char {
        char::from(id.0.as_u128() as u8)
    }

    /// Each line is an event and the actions that follow it: `enter` and `leave` begin and end a
    /// request, `give_up` sets the number of waiting requests to 0.
    fn check(budget: u64, script: &str) {
        let mut eviction = Eviction::new(budget);
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (event, expect) = line.split_once("=>").unwrap_or((line, ""));
            assert_eq!(run(&mut eviction, event), expect.trim(), "{line}");
        }
    }

    fn run(eviction: &mut Eviction, event: &str) -> String {
        let words: Vec<_> = event.split_whitespace().collect();
        let mut said = String::new();
        match words[..] {
            ["offer", model, bytes, ref rest @ ..] => {
                let fits = eviction.offer(id(model), bytes.parse().unwrap(), rest == ["pinned"]);
                said.push_str(if fits { "" } else { "too large " });
            }
            ["enter", model] if eviction.begin_request(id(model)) => said.push_str("starts "),
            ["enter", model] => {
                eviction.set_waiting(id(model), eviction.get(id(model)).waiting + 1);
            }
            ["leave", model] => eviction.end_request(id(model)),
            ["give_up", model] => eviction.set_waiting(id(model), 0),
            ["loaded", model, bytes] if eviction.finish_load(id(model), bytes.parse().unwrap()) => {
            }
            ["loaded", ..] => said.push_str("too large "),
            ["unloaded", model] => eviction.mark_unloaded(id(model)),
            _ => panic!("unknown event: {event}"),
        }
        while let Some(action) = eviction.next_action() {
            match action {
                PoolAction::Load(id) => write!(said, "load {} ", name(id)),
                PoolAction::Unload(id) => write!(said, "unload {} ", name(id)),
                PoolAction::Grant(id) => write!(said, "grant {} ", name(id)),
            }
            .unwrap();
        }
        said.trim_end().to_owned()
    }

    #[test]
    fn models_are_loaded_on_demand_and_stay_while_there_is_room() {
        check(
            10,
            "offer a 4
             offer b 6
             enter a       => load a
             enter b
             enter a
             loaded a 4    => grant a load b
             enter a       => starts
             loaded b 6    => grant b
             leave b
             leave a
             enter b       => starts",
        );
    }

    #[test]
    fn the_least_recently_used_idle_model_makes_room() {
        check(
            10,
            "offer a 4
             offer b 4
             offer c 4
             offer d 8
             enter a       => load a
             loaded a 4    => grant a
             enter b       => load b
             loaded b 4    => grant b
             leave a
             leave b
             enter c       => unload a
             enter a
             unloaded a        => load c
             loaded c 4    => grant c unload b
             unloaded b        => load a
             loaded a 4    => grant a
             leave c
             leave a
             enter d       => unload c
             unloaded c        => unload a
             unloaded a        => load d",
        );
    }

    #[test]
    fn a_busy_model_finishes_its_work_and_takes_nothing_new() {
        check(
            10,
            "offer a 10
             offer b 10
             enter a       => load a
             loaded a 10   => grant a
             enter a       => starts
             enter b
             enter a
             leave a
             leave a       => unload a
             unloaded a        => load b
             loaded b 10   => grant b
             enter b
             leave b       => unload b
             unloaded b        => load a
             loaded a 10   => grant a",
        );
    }

    #[test]
    fn a_request_that_gave_up_displaces_no_model() {
        check(
            10,
            "offer a 10
             offer b 10
             enter a       => load a
             loaded a 10   => grant a
             enter b
             enter a
             give_up b       => grant a
             enter a       => starts",
        );
    }

    #[test]
    fn pinned_models_stay_and_a_model_that_cannot_fit_beside_them_is_refused() {
        check(
            10,
            "offer a 6 pinned
             offer b 5     => too large
             offer c 4
             offer d 3
             enter a       => load a
             loaded a 6    => grant a
             leave a
             enter c       => load c
             loaded c 4    => grant c
             leave c
             enter d       => unload c
             unloaded c        => load d
             loaded d 5    => too large grant d
             enter a       => starts",
        );
    }

    #[test]
    fn a_model_that_is_larger_than_estimated_displaces_others() {
        check(
            10,
            "offer a 4
             offer b 4
             enter a       => load a
             loaded a 4    => grant a
             enter b       => load b
             loaded b 7    => grant b
             enter a
             leave a       => unload a
             unloaded a
             leave b       => unload b
             unloaded b        => load a",
        );
    }

    #[test]
    fn a_lost_model_is_loaded_again_for_the_next_request() {
        check(
            10,
            "offer a 10
             enter a       => load a
             loaded a 10   => grant a
             unloaded a
             enter a       => load a
             leave a
             unloaded a        => load a
             give_up a
             loaded a 10
             enter a       => starts",
        );
    }
}
