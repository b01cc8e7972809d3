//! Decides on which device a request runs, where models run on several. Pure.
//!
//! The requests of a session go to one device as long as nothing waits there, because its cache
//! holds how they begin. Otherwise the device takes them on which the fewest wait. A model is
//! loaded on a further device once requests wait on each that has it, one device at a time.

use cresset_base::ModelId;
use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};
use uuid::Uuid;

/// A model on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub device: usize,
    pub model: ModelId,
}

/// A device that could take a request, and how its model stands there.
#[derive(Clone, Copy, Debug)]
pub(super) struct PossiblePlace {
    pub device: usize,
    /// The model takes requests there.
    pub has_model: bool,
    pub is_loading: bool,
    /// Requests for the model that wait there.
    pub waiting: usize,
    pub running: usize,
    /// The model could be loaded there without unloading another one.
    pub has_room: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub device: usize,
    /// Another device on which the model is to be loaded.
    pub also_load: Option<usize>,
}

/// The place of a request; `None` without candidates.
pub(super) fn choose(candidates: &[PossiblePlace], session: Uuid) -> Option<Placement> {
    let weight = |one: &PossiblePlace| weight(session, one.device);
    let having = || candidates.iter().filter(|one| one.has_model);
    let on = |one: &PossiblePlace| Placement { device: one.device, also_load: None };
    let Some(own) = having().max_by_key(|one| weight(one)) else {
        let best = |one: &&PossiblePlace| (one.is_loading, one.has_room, weight(one));
        return candidates.iter().max_by_key(best).map(on);
    };
    if own.waiting == 0 {
        return Some(on(own));
    }
    let least = having().min_by_key(|one| (one.waiting, one.running, Reverse(weight(one))))?;
    let is_crowded = least.waiting > 0 && !candidates.iter().any(|one| one.is_loading);
    let further = candidates.iter().filter(|one| is_crowded && !one.has_model && one.has_room);
    let also_load = further.max_by_key(|one| weight(one)).map(|one| one.device);
    Some(Placement { also_load, ..on(least) })
}

/// A session stays on that device with its model which has the largest weight. So a further device
/// takes over its share of the sessions and the others stay where they are (rendezvous hashing;
/// Thaler and Ravishankar, 1998).
fn weight(session: Uuid, device: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    (session, device).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices<const N: usize>(each: [(bool, usize, usize, bool); N]) -> [PossiblePlace; N] {
        let mut device = 0..;
        each.map(|(has_model, waiting, running, has_room)| {
            let device = device.next().unwrap();
            PossiblePlace { device, has_model, is_loading: false, waiting, running, has_room }
        })
    }

    /// Where the requests of a hundred sessions go.
    fn shares<const N: usize>(candidates: &[PossiblePlace; N]) -> [usize; N] {
        let mut shares = [0; N];
        for session in 0..100 {
            let chosen = choose(candidates, Uuid::from_u128(session)).unwrap();
            shares[chosen.device] += 1;
        }
        shares
    }

    #[test]
    fn sessions_are_spread_over_the_devices_that_have_the_model() {
        let [a, b, c] =
            shares(&devices([(true, 0, 9, true), (true, 0, 1, true), (false, 0, 0, true)]));
        assert!(a > 30 && b > 30 && c == 0, "{a} {b} {c}");
    }

    #[test]
    fn a_further_device_moves_only_the_sessions_that_it_takes() {
        let (two, three) = (devices([(true, 0, 0, true); 2]), devices([(true, 0, 0, true); 3]));
        for session in (0..100).map(Uuid::from_u128) {
            let [before, after] =
                [&two[..], &three[..]].map(|candidates| choose(candidates, session).unwrap());
            assert!(after == before || after.device == 2, "{session}");
        }
    }

    #[test]
    fn requests_wait_where_the_fewest_wait_and_the_model_is_loaded_on_a_further_device() {
        let check = |candidates: &[PossiblePlace], device, also_load| {
            for session in (0..20).map(Uuid::from_u128) {
                let found = choose(candidates, session);
                assert_eq!(found, Some(Placement { device, also_load }), "{session}");
            }
        };
        let crowded = (true, 3, 8, true);
        check(&devices([crowded, (true, 2, 9, true)]), 1, None);
        check(&devices([crowded, (true, 3, 7, true)]), 1, None);
        check(&devices([crowded, (false, 0, 0, true)]), 0, Some(1));
        check(&devices([crowded, (false, 0, 0, false)]), 0, None);
        check(&devices([(false, 0, 0, false), (false, 0, 0, true)]), 1, None);
        assert_eq!(choose(&[], Uuid::nil()), None);
        // What is being loaded takes requests only where nothing else does, and is enough.
        let mut loading = devices([crowded, (false, 0, 0, true), (false, 0, 0, true)]);
        loading[1].is_loading = true;
        check(&loading, 0, None);
        check(&loading[1..], 1, None);
    }
}
