//! Inputs for fuzz tests that are close to what a reader accepts: a seed with changes.

/// A change: its place, its kind, and a byte for it. Any three numbers are a valid change, so no
/// input of a fuzzer is wasted.
type Edit = (u32, u8, u8);

/// The choice of a fuzzer: a seed, how many changes, and the changes.
pub type Mutation = (u8, Vec<Edit>);

/// Longest stretch that is copied within the bytes.
const STRETCH: usize = 24;

/// Returns the chosen seed with up to 7 changes: with few changes it stays close to what is
/// accepted.
pub fn mutated(seeds: &[&[u8]], (choice, edits): &Mutation) -> Vec<u8> {
    let mut bytes = seeds[usize::from(*choice) % seeds.len()].to_vec();
    for &(place, what, byte) in edits.iter().take(usize::from(choice / 32)) {
        let at = place as usize % (bytes.len() + 1);
        match what % 8 {
            0 | 1 => bytes.insert(at, byte),
            2 => drop(bytes.splice(at..bytes.len().min(at + usize::from(byte % 8)), [])),
            3 => {
                let from = usize::from(byte) % (bytes.len() + 1);
                let stretch = bytes[from..bytes.len().min(from + STRETCH)].to_vec();
                drop(bytes.splice(at..at, stretch));
            }
            4 if byte < 8 => bytes.truncate(at),
            _ => {
                if let Some(changed) = bytes.get_mut(at) {
                    *changed = if what % 2 == 0 { byte } else { *changed ^ (1 << (byte % 8)) };
                }
            }
        }
    }
    bytes
}
