//! Which models are in memory: whom to load, whom to let go. Pure; `fleet` does what it says.
//!
//! One thing happens at a time: a load, or the unload that makes room for it. The model that is
//! waited for longest comes next. Room is taken from the least recently used idle model; where none
//! is idle, the least recently used busy one takes nothing new until its work is done. Pinned
//! models stay.

use crate::ids::ModelId;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Cold,
    Loading,
    Warm,
    Unloading,
}

/// What is to be done now; `next_action` has noted it as begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Load(ModelId),
    Unload(ModelId),
    /// Everybody who waits for the model goes in.
    Admit(ModelId),
}

#[derive(Clone, Copy, Debug)]
pub struct Resident {
    pub phase: Phase,
    /// Weights and KV cache: an estimate until the model was loaded for the first time.
    pub bytes: u64,
    pub pinned: bool,
    /// Requests on it.
    pub active: usize,
    /// Requests that wait for it.
    pub waiting: usize,
    /// Loaded for those who wait: they go in whoever else wants its place.
    fresh: bool,
    /// Number of the event at which it was last entered or left.
    used: u64,
    /// Number of the event since which somebody waits.
    asked: u64,
}

#[derive(Debug)]
pub struct Residency {
    /// Bytes for all models together.
    budget: u64,
    models: BTreeMap<ModelId, Resident>,
    events: u64,
}

impl Residency {
    pub fn new(budget: u64) -> Self {
        Self { budget, models: BTreeMap::new(), events: 0 }
    }

    /// Makes a model known; `false` when it could never be loaded beside the pinned ones.
    pub fn offer(&mut self, id: ModelId, bytes: u64, pinned: bool) -> bool {
        let resident = Resident {
            phase: Phase::Cold,
            bytes,
            pinned,
            active: 0,
            waiting: 0,
            fresh: false,
            used: 0,
            asked: 0,
        };
        self.models.insert(id, resident);
        self.fits(id)
    }

    pub fn get(&self, id: ModelId) -> &Resident {
        &self.models[&id]
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes left for one more model now.
    pub fn free(&self) -> u64 {
        self.budget.saturating_sub(self.held())
    }

    fn held(&self) -> u64 {
        self.models
            .values()
            .filter(|model| model.phase != Phase::Cold)
            .map(|model| model.bytes)
            .sum()
    }

    /// True: the request goes ahead, and `leave` ends it. False: it has to wait.
    pub fn enter(&mut self, id: ModelId) -> bool {
        let goes = self.takes_work(id);
        let now = self.tick();
        let model = self.model(id);
        if goes {
            model.active += 1;
            model.used = now;
        }
        goes
    }

    pub fn leave(&mut self, id: ModelId) {
        let now = self.tick();
        let model = self.model(id);
        model.active -= 1;
        model.used = now;
    }

    /// How many wait for the model now.
    pub fn set_waiting(&mut self, id: ModelId, count: usize) {
        let now = self.tick();
        let model = self.model(id);
        if model.waiting == 0 {
            model.asked = now;
        }
        model.waiting = count;
    }

    /// A load is done and took `bytes`. False when that is more than there may ever be.
    pub fn loaded(&mut self, id: ModelId, bytes: u64) -> bool {
        let model = self.model(id);
        (model.phase, model.bytes, model.fresh) = (Phase::Warm, bytes, model.waiting > 0);
        self.fits(id)
    }

    /// The model holds no memory any more.
    pub fn gone(&mut self, id: ModelId) {
        self.model(id).phase = Phase::Cold;
    }

    /// Call it until it says `None`, after everything that was told.
    pub fn next_action(&mut self) -> Option<Action> {
        let ready = |(id, model): &(&ModelId, &Resident)| {
            model.waiting > 0 && (model.fresh || self.takes_work(**id))
        };
        if let Some((&id, _)) = self.models.iter().find(ready) {
            let now = self.tick();
            let model = self.model(id);
            model.active += std::mem::take(&mut model.waiting);
            (model.fresh, model.used) = (false, now);
            return Some(Action::Admit(id));
        }
        if let Some(victim) = self.victim() {
            let model = self.model(victim);
            if model.active > 0 {
                return None;
            }
            model.phase = Phase::Unloading;
            return Some(Action::Unload(victim));
        }
        let id = self.wanted().filter(|id| self.models[id].bytes <= self.free())?;
        self.model(id).phase = Phase::Loading;
        Some(Action::Load(id))
    }

    fn fits(&self, id: ModelId) -> bool {
        let others = self.models.iter().filter(|(other, model)| **other != id && model.pinned);
        others.map(|(_, model)| model.bytes).sum::<u64>() + self.models[&id].bytes <= self.budget
    }

    fn takes_work(&self, id: ModelId) -> bool {
        self.models[&id].phase == Phase::Warm && self.victim() != Some(id)
    }

    /// The cold model to be loaded next; none while another one comes or goes.
    fn wanted(&self) -> Option<ModelId> {
        if self.in_transit() {
            return None;
        }
        let cold =
            self.models.iter().filter(|(_, model)| model.phase == Phase::Cold && model.waiting > 0);
        cold.min_by_key(|(_, model)| model.asked).map(|(id, _)| *id)
    }

    fn in_transit(&self) -> bool {
        self.models.values().any(|model| matches!(model.phase, Phase::Loading | Phase::Unloading))
    }

    /// Who has to go, at once if idle and else when its work is done: for the wanted model, or
    /// because a model turned out larger than was thought.
    fn victim(&self) -> Option<ModelId> {
        let needed = self.wanted().map_or(0, |id| self.models[&id].bytes);
        if self.in_transit() || self.held() + needed <= self.budget {
            return None;
        }
        let loose =
            self.models.iter().filter(|(_, model)| model.phase == Phase::Warm && !model.pinned);
        loose.min_by_key(|(_, model)| (model.active > 0, model.used)).map(|(id, _)| *id)
    }

    fn tick(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    fn model(&mut self, id: ModelId) -> &mut Resident {
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

    /// Each line is an event and what is to be done then. `waiting` counts those who were told to
    /// wait.
    fn check(budget: u64, script: &str) {
        let mut residency = Residency::new(budget);
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (event, expect) = line.split_once("=>").unwrap_or((line, ""));
            assert_eq!(run(&mut residency, event), expect.trim(), "{line}");
        }
    }

    fn run(residency: &mut Residency, event: &str) -> String {
        let words: Vec<_> = event.split_whitespace().collect();
        let mut said = String::new();
        match words[..] {
            ["offer", model, bytes, ref rest @ ..] => {
                let fits = residency.offer(id(model), bytes.parse().unwrap(), rest == ["pinned"]);
                said.push_str(if fits { "" } else { "too large " });
            }
            ["enter", model] if residency.enter(id(model)) => said.push_str("goes "),
            ["enter", model] => {
                residency.set_waiting(id(model), residency.get(id(model)).waiting + 1)
            }
            ["leave", model] => residency.leave(id(model)),
            ["tired", model] => residency.set_waiting(id(model), 0),
            ["loaded", model, bytes] if residency.loaded(id(model), bytes.parse().unwrap()) => {}
            ["loaded", ..] => said.push_str("too large "),
            ["gone", model] => residency.gone(id(model)),
            _ => panic!("unknown event: {event}"),
        }
        while let Some(action) = residency.next_action() {
            match action {
                Action::Load(id) => write!(said, "load {} ", name(id)),
                Action::Unload(id) => write!(said, "unload {} ", name(id)),
                Action::Admit(id) => write!(said, "admit {} ", name(id)),
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
             loaded a 4    => admit a load b
             enter a       => goes
             loaded b 6    => admit b
             leave b
             leave a
             enter b       => goes",
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
             loaded a 4    => admit a
             enter b       => load b
             loaded b 4    => admit b
             leave a
             leave b
             enter c       => unload a
             enter a
             gone a        => load c
             loaded c 4    => admit c unload b
             gone b        => load a
             loaded a 4    => admit a
             leave c
             leave a
             enter d       => unload c
             gone c        => unload a
             gone a        => load d",
        );
    }

    #[test]
    fn a_busy_model_finishes_its_work_and_takes_nothing_new() {
        check(
            10,
            "offer a 10
             offer b 10
             enter a       => load a
             loaded a 10   => admit a
             enter a       => goes
             enter b
             enter a
             leave a
             leave a       => unload a
             gone a        => load b
             loaded b 10   => admit b
             enter b
             leave b       => unload b
             gone b        => load a
             loaded a 10   => admit a",
        );
    }

    #[test]
    fn who_no_longer_waits_displaces_nobody() {
        check(
            10,
            "offer a 10
             offer b 10
             enter a       => load a
             loaded a 10   => admit a
             enter b
             enter a
             tired b       => admit a
             enter a       => goes",
        );
    }

    #[test]
    fn pinned_models_stay_and_what_cannot_fit_beside_them_is_refused() {
        check(
            10,
            "offer a 6 pinned
             offer b 5     => too large
             offer c 4
             offer d 3
             enter a       => load a
             loaded a 6    => admit a
             leave a
             enter c       => load c
             loaded c 4    => admit c
             leave c
             enter d       => unload c
             gone c        => load d
             loaded d 5    => too large admit d
             enter a       => goes",
        );
    }

    #[test]
    fn a_model_that_is_larger_than_was_thought_displaces_others() {
        check(
            10,
            "offer a 4
             offer b 4
             enter a       => load a
             loaded a 4    => admit a
             enter b       => load b
             loaded b 7    => admit b
             enter a
             leave a       => unload a
             gone a
             leave b       => unload b
             gone b        => load a",
        );
    }

    #[test]
    fn a_lost_model_is_loaded_again_for_whoever_asks() {
        check(
            10,
            "offer a 10
             enter a       => load a
             loaded a 10   => admit a
             gone a
             enter a       => load a
             leave a
             gone a        => load a
             tired a
             loaded a 10
             enter a       => goes",
        );
    }
}
