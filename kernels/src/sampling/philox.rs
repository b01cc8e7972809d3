//! Philox4x32-10: random numbers as a function of a key and a counter, without state
//! (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Four independent uniform words for each (counter, key).
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    lanes(counter.map(|word| [word]), key).map(|[word]| word)
}

/// Computes `N` counters side by side: `counter[i][lane]`.
#[inline(always)]
pub(super) fn lanes<const N: usize>(
    mut counter: [[u32; N]; 4],
    mut key: [u32; 2],
) -> [[u32; N]; 4] {
    for _ in 0..ROUNDS {
        let before = counter;
        for i in 0..N {
            let (high0, low0) = wide_product(MULTIPLIERS[0], before[0][i]);
            let (high1, low1) = wide_product(MULTIPLIERS[1], before[2][i]);
            counter[0][i] = high1 ^ before[1][i] ^ key[0];
            counter[1][i] = low1;
            counter[2][i] = high0 ^ before[3][i] ^ key[1];
            counter[3][i] = low0;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[inline(always)]
fn wide_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the reference implementation (Random123, `kat_vectors`).
    #[test]
    fn known_answers() {
        let check = |counter, key, expect| assert_eq!(philox4x32(counter, key), expect);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }
}
